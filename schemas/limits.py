"""How many steps a run has, how far its sampling runs ahead, and how much fits into its events. All are
known when it is submitted."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.algorithms import is_offline
from schemas.config import EvalAdvanced, RunConfig, Training
from schemas.events import MAX_EVENT_BYTES
from schemas.specs import RubricSpec

GROUP_BYTES = 330
"""Approximate bytes of one group in BatchAssembled, without its rewards."""

LARGEST_REWARD = 1e6
"""A sample with a larger reward fails: it would drown the rewards of its whole batch. So a weight of a
part of the reward is not larger either."""

REWARD_BYTES = 22
SAMPLE_BYTES = 420
"""Approximate bytes of one sample in GroupGenerated and GroupGraded."""

PART_BYTES = 30
"""The most bytes that the value of one reward function takes in these events, without its name."""


def weight_problem(weight: float, *, largest_part: float = 1.0) -> str | None:
    """Return what is wrong with the weight of a part of the reward, or None. `largest_part` is the
    largest absolute value that the part has for certain."""
    if not math.isfinite(weight):
        return f"must be a finite number, got {weight}"
    if abs(weight) * max(1.0, largest_part) > LARGEST_REWARD:
        most = LARGEST_REWARD / max(1.0, largest_part)
        return (
            f"must be from {-most:,.15g} to {most:,.15g}, got {weight:g}, because a reward of more "
            f"than {LARGEST_REWARD:,.0f} fails its sample; set a smaller weight"
        )
    return None


def batch_size(config: RunConfig) -> int:
    """The number of dataset rows in a step."""
    if is_offline(config.advanced):
        return config.advanced.batch_size
    return config.training.rollout_batch_size


def groups_per_step(config: RunConfig) -> int:
    """The number of groups that a step samples, and of the rows that it needs."""
    curriculum = config.advanced.curriculum
    return curriculum.num_groups(batch_size(config)) if curriculum else batch_size(config)


def total_steps(config: RunConfig, num_rows: int) -> int:
    """The number of steps in the whole run: `advanced.max_steps`, or as many as the epochs need."""
    if config.advanced.max_steps is not None:
        return config.advanced.max_steps
    return math.ceil(config.training.total_epochs * num_rows / batch_size(config))


FULLY_ASYNC_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """How far sampling may run ahead of learning (`depth` steps beyond the next one), and how many
    versions lie between two weight updates of the samplers (`interval`)."""

    depth: int
    interval: int = 1

    @property
    def most_lag(self) -> int:
        """The largest number of versions between the policy that sampled a group and the one it
        trains."""
        return self.depth + self.interval - 1

    def pinned_version(self, step: int) -> int:
        """The policy version that the groups of `step` (from 1) sample with."""
        return max(0, step - 1 - self.depth) // self.interval * self.interval


def pace_of(config: RunConfig) -> Pace:
    """The pace of a run, from its execution mode and the keys that change it."""
    default = {"one_step_off_async": 1, "fully_async": FULLY_ASYNC_DEPTH}
    depth = config.advanced.max_steps_off_policy
    mode = config.advanced.execution_mode
    return Pace(
        default.get(mode, 0) if depth is None else depth, config.advanced.weight_sync_interval
    )


MOST_OFFLINE_ROWS = MAX_EVENT_BYTES // 12
"""The most rows of a step without samples, so that their positions fit into one BatchAssembled."""


MOST_MOVED_ROWS = (MAX_EVENT_BYTES - 4096) // 11
"""The most rows that change their pool in a step, so that they fit into one PoolsDecided."""

REWARD_MODEL_BYTES = 6 << 10
"""The bytes of a reward model in an event: its weights, and the files of a base that is a checkpoint."""


def most_samples(
    rewards: Sequence[str],
    rubrics: Sequence[RubricSpec] = (),
    reward_models: Sequence[str] = (),
) -> int:
    """The largest number of samples in a group, so that they and their grades fit into one event, which
    repeats the rubrics and the reward models. `rewards` are the names of reward functions, and
    `reward_models` those of the scores of reward models."""
    names = [*rewards, *(rubric.name for rubric in rubrics), *reward_models]
    parts = sum(len(name.encode()) + PART_BYTES for name in names)
    repeated = rubric_bytes(rubrics) + REWARD_MODEL_BYTES * len(reward_models)
    return (MAX_EVENT_BYTES - 8192 - repeated) // (SAMPLE_BYTES + parts)


def most_groups(samples: int, parts: Sequence[str] = ()) -> int:
    """The largest number of groups in a step, of `samples` samples each, so that they fit into one
    event. `parts` are the names of the parts of a reward that the event holds."""
    names = sum(len(name.encode()) + 6 for name in parts)
    values = (REWARD_BYTES + PART_BYTES * len(parts)) * samples
    return (MAX_EVENT_BYTES - 4096) // (GROUP_BYTES + names + values)


def rubric_bytes(rubrics: Iterable[RubricSpec]) -> int:
    """Return the bytes that rubrics take in an event."""
    return sum(len(rubric.model_dump_json().encode()) for rubric in rubrics)


def longest_answer(lengths: Training | EvalAdvanced) -> int:
    """Return the most tokens that one answer of the policy may have."""
    return lengths.max_answer_length or lengths.max_response_length
