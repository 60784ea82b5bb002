"""How many steps a run has, and how much fits into its events. Both are known when it is submitted."""

import math
from collections.abc import Sequence

from schemas.config import RewardWeight, RunConfig
from schemas.events import MAX_EVENT_BYTES

GROUP_BYTES = 330
"""Approximate bytes of one group in BatchAssembled, without its rewards."""

REWARD_BYTES = 22
SAMPLE_BYTES = 420
"""Approximate bytes of one sample in GroupGenerated and GroupGraded."""

PART_BYTES = 30
"""The most bytes that the value of one reward function takes there, without its name."""


def batch_size(config: RunConfig) -> int:
    """Dataset rows of a step."""
    if config.advanced.algorithm == "sft":
        return config.advanced.batch_size
    return config.training.rollout_batch_size


def total_steps(config: RunConfig, num_rows: int) -> int:
    """Steps of the whole run: `advanced.max_steps`, or else as many as the epochs need."""
    if config.advanced.max_steps is not None:
        return config.advanced.max_steps
    return math.ceil(config.training.total_epochs * num_rows / batch_size(config))


MOST_SFT_ROWS = MAX_EVENT_BYTES // 12
"""Rows of an sft step whose positions fit into one BatchAssembled."""


def most_samples(rewards: Sequence[RewardWeight]) -> int:
    """The largest group whose samples and grades fit into one event."""
    parts = sum(len(reward.name.encode()) + PART_BYTES for reward in rewards)
    return (MAX_EVENT_BYTES - 8192) // (SAMPLE_BYTES + parts)


def most_groups(samples: int) -> int:
    """The largest number of groups, of so many samples each, whose step fits into one event."""
    return (MAX_EVENT_BYTES - 4096) // (GROUP_BYTES + REWARD_BYTES * samples)
