"""How long a run is, and what cannot fit into its events: known at submit, before anything runs."""

import math
from collections.abc import Sequence

from schemas.config import RewardWeight, RunConfig
from schemas.events import MAX_EVENT_BYTES

GROUP_BYTES = 330
"""About what one group takes in BatchAssembled beside its rewards, in bytes."""

REWARD_BYTES = 22
SAMPLE_BYTES = 420
"""About what one sample takes in GroupGenerated and GroupGraded, in bytes."""

PART_BYTES = 30
"""What a reward function's value takes there beside its name, at most."""


def batch_size(config: RunConfig) -> int:
    """Dataset rows a step takes."""
    if config.advanced.algorithm == "sft":
        return config.advanced.batch_size
    return config.training.rollout_batch_size


def total_steps(config: RunConfig, num_rows: int) -> int:
    """Steps of the whole run: `max_steps`, else as many as the epochs need."""
    if config.advanced.max_steps is not None:
        return config.advanced.max_steps
    return math.ceil(config.training.total_epochs * num_rows / batch_size(config))


def too_many_samples(num: int, rewards: Sequence[RewardWeight]) -> str | None:
    """Why the grades of a group of so many samples would not fit into one event, or None."""
    parts = sum(len(reward.name.encode()) + PART_BYTES for reward in rewards)
    most = (MAX_EVENT_BYTES - 8192) // (SAMPLE_BYTES + parts)
    beside = f" with {len(rewards)} reward functions" if rewards else ""
    return f"must be at most {most}{beside}, got {num}" if num > most else None


def too_large(config: RunConfig) -> str | None:
    """Why a step of this run would not fit into an event, or None."""
    if config.advanced.algorithm == "sft":
        most = MAX_EVENT_BYTES // 12
        if config.advanced.batch_size > most:
            return f"advanced.batch_size may be at most {most}"
        return None
    samples = config.training.n_samples_per_prompt
    if reason := too_many_samples(samples, config.advanced.rewards):
        return f"training.n_samples_per_prompt {reason}"
    most_groups = (MAX_EVENT_BYTES - 4096) // (GROUP_BYTES + REWARD_BYTES * samples)
    if config.training.rollout_batch_size > most_groups:
        return (
            f"training.rollout_batch_size may be at most {most_groups} with "
            f"{samples} samples per prompt"
        )
    return None
