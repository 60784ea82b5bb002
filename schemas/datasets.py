"""The rows of a dataset: how they are stored after it was validated and normalised to JSON Lines, and
which of them a run trains on."""

import math
from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.sampling import Message, ModelRef, SampleRecord, ToolSpec, Value

LABELLED_COLUMNS = frozenset({"user_prompt", "system_prompt", "messages", "ground_truth"})
"""The columns of rows that hold a prompt and a label. A file with one of them has no preferences."""

PreferenceForm = Literal["paired", "binary"]
"""`paired`: a row has a chosen and a rejected answer. `binary`: it has one answer, and whether that is
desirable."""

PREFERENCE_COLUMNS: dict[PreferenceForm, tuple[str, ...]] = {
    "paired": ("prompt", "chosen", "rejected"),
    "binary": ("prompt", "completion", "label"),
}

OPTIONAL_COLUMNS: dict[PreferenceForm, tuple[str, ...]] = {"paired": ("margin",), "binary": ()}
"""Columns that rows of preferences may have besides."""


def is_none(value: object) -> bool:
    """Whether a field is left out of the bytes of its model, because it came later than others."""
    return value is None


class Trajectory(Value):
    """A graded group as a run recorded it: the tokens of its samples with the logprobs of the policy
    `version` that sampled them, and their rewards (None: it is left out of the baseline), in one order.
    `parts` are those of the rewards by name. `group` is the id of the group."""

    group: str
    version: int = Field(ge=0)
    samples: tuple[SampleRecord, ...]
    rewards: tuple[float | None, ...]
    parts: dict[str, tuple[float | None, ...]] = Field(
        default={}, exclude_if=lambda value: not value
    )


class DatasetRow(Value):
    """One row. `label` is the ground truth, which only graders and SFT see. `tools` are those that the
    conversation of a demonstration offers. A row of preferences has no label: `chosen` is its better
    or desirable answer, `rejected` its worse or undesirable one, and `margin` by how much their rewards
    should differ. A row of trajectories has no answer of its own: `trajectory` is a recorded group."""

    prompt: tuple[Message, ...]
    label: str | None = None
    metadata: dict[str, object] = Field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = Field(default=(), exclude_if=lambda value: not value)
    chosen: str | None = Field(default=None, exclude_if=is_none)
    rejected: str | None = Field(default=None, exclude_if=is_none)
    margin: float | None = Field(default=None, exclude_if=is_none)
    trajectory: Trajectory | None = Field(default=None, exclude_if=is_none)

    def to_line(self) -> bytes:
        """The row as one line of the normalised content, newline included."""
        return self.model_dump_json().encode() + b"\n"


def parse_rows(content: bytes) -> tuple[DatasetRow, ...]:
    """Normalised content -> rows. Raises ValueError on anything else."""
    return tuple(DatasetRow.model_validate_json(line) for line in content.splitlines() if line)


def preference_form(columns: Collection[str]) -> PreferenceForm | None:
    """The form of the preferences in a file with these columns; None if it has none. Public datasets of
    pairs have the chosen answer in a column `messages` too, which is not read there."""
    names = set(columns)
    if {"chosen", "rejected"} <= names:
        return None if names & (LABELLED_COLUMNS - {"messages"}) else "paired"
    if names & LABELLED_COLUMNS or not {"completion", "label"} <= names:
        return None
    return "binary" if "prompt" in names or "metadata" not in names else None


RowsKind = Literal["sft", "preference", "trajectory"]
"""The rows that recorded samples become: demonstrations, pairs of answers, or groups for offline RL."""

TRAJECTORY_COLUMNS = ("prompt", "trajectory")


class DatasetOrigin(Value):
    """The run or evaluation whose recorded samples became a dataset. `owner` is its id, and `name` its
    name then. The groups are those of the steps from `first_step` to `last_step` (both are 0 of an
    evaluation), as the log had them at `position`. The other fields are the filters of the request.
    Trajectories have the `model` and the `temperature` with which they were sampled, the versions that
    sampled them, and the number of samples of their groups, if it is the same in all of them."""

    owner: str
    name: str
    purpose: Literal["train", "evaluate"]
    kind: RowsKind
    first_step: int
    last_step: int
    position: str
    min_reward: float | None = None
    max_reward: float | None = None
    dedupe: bool = False
    best_of_group: bool = False
    limit: int | None = None
    reward_margin: float = 0.0
    model: ModelRef | None = None
    temperature: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    num_samples: int | None = None

    @property
    def is_trajectories(self) -> bool:
        return self.kind == "trajectory"


Pool = Literal["easy", "hard"]
"""The rows that a policy passes too often, or too rarely. All other rows are in no pool."""

PASS_REWARD = 1.0


class Curriculum(BaseModel):
    """The rows of a run by their pass rates: `[advanced.curriculum]`
    ([algorithms](algorithms.md#curricula))."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_pass_rate: float | None = Field(default=None, gt=0, lt=1)
    """a row whose pass rate is lower goes to the hard pool"""
    max_pass_rate: float | None = Field(default=None, gt=0, lt=1)
    """a row whose pass rate is higher goes to the easy pool"""
    hard_fraction: float | None = Field(default=None, ge=0, lt=1)
    """the share of a step's groups whose rows come from the hard pool; default: 0"""
    easy_fraction: float | None = Field(default=None, ge=0, lt=1)
    """the share of a step's groups whose rows come from the easy pool; default: 0"""
    pass_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """a sample passes if its reward is at least this; default: 1.0"""
    oversampling_factor: float | None = Field(default=None, gt=1, le=4)
    """a step samples so many times `training.rollout_batch_size` groups, and trains on the first ones
    whose rewards differ"""

    @property
    def has_pools(self) -> bool:
        return self.min_pass_rate is not None or self.max_pass_rate is not None

    def is_pass(self, reward: float) -> bool:
        return reward >= (PASS_REWARD if self.pass_reward is None else self.pass_reward)

    def pool_of(self, pass_rate: float) -> Pool | None:
        """The pool of a row with this pass rate; None if it is in none. Both bounds are included in the
        range of the rows that are in none."""
        if self.min_pass_rate is not None and pass_rate < self.min_pass_rate:
            return "hard"
        if self.max_pass_rate is not None and pass_rate > self.max_pass_rate:
            return "easy"
        return None

    def num_groups(self, batch: int) -> int:
        """The number of groups that a step samples for a batch of `batch` groups."""
        # 10 x 1.1 is above 11 in binary.
        return math.ceil(batch * (self.oversampling_factor or 1.0) - 1e-9)

    def shares(self, step: int, num_groups: int) -> dict[Pool, int]:
        """How many groups of a step (from 1) have rows of each pool. Over many steps their shares are
        the fractions, however small a step is."""
        return {
            "easy": _share(self.easy_fraction or 0.0, step, num_groups),
            "hard": _share(self.hard_fraction or 0.0, step, num_groups),
        }


def _share(fraction: float, step: int, num_groups: int) -> int:
    return math.floor(fraction * step * num_groups) - math.floor(fraction * (step - 1) * num_groups)
