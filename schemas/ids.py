"""Names of things, and how new ids are derived.

Every id that Headrace makes is derived from its cause. Repeating something after a crash therefore
makes the same id, and the keys of the database can reject the second copy. Nothing here is random.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType
from uuid import UUID, uuid5

RunId = NewType("RunId", str)
EvalId = NewType("EvalId", str)
WorkspaceId = NewType("WorkspaceId", str)
DatasetId = NewType("DatasetId", str)
GroupId = NewType("GroupId", str)
SampleId = NewType("SampleId", str)
StreamName = NewType("StreamName", str)
ConsumerName = NewType("ConsumerName", str)
EventId = NewType("EventId", UUID)
EffectId = NewType("EffectId", UUID)
WorkerId = NewType("WorkerId", str)

HEADRACE = UUID("6f1c0c9e-6a0b-5a43-9d5c-0b8f6d0f7a11")
"""The root namespace of all derived ids."""


class Purpose(StrEnum):
    """Why a group is generated."""

    TRAIN = "train"
    EVALUATE = "evaluate"


def derive_id(cause: UUID, name: str) -> UUID:
    """The id of the result that `cause` has under `name` (a uuid5, so the same inputs give the same
    id)."""
    return uuid5(cause, name)


def short_id(kind: str, key: str) -> str:
    """A 16-digit hex id for the thing of this `kind` that `key` identifies."""
    return derive_id(HEADRACE, f"{kind}/{key}").hex[:16]


def run_of_owner(owner: str) -> str:
    """The run that the owner of a group belongs to. A validation of a run has the run's id and its step
    as its id; every other owner is a run or an evaluation itself."""
    run, mark, step = owner.rpartition("v")
    return run if mark and run and step.isdigit() else owner


def is_id(text: str) -> bool:
    """Whether a text has the form of the id of a run, an evaluation (`RUNv4` is a run's own after step
    4) or a dataset. Nothing is given a name of this form, because another thing may have that id."""
    return re.fullmatch(r"[0-9a-f]{16}(v[0-9]+)?", text) is not None


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identifies a group: the G samples of one dataset row, for one slot of one step.

    `owner` is the run or the evaluation that requested it. `replacement` counts the groups that
    were dropped from this slot before. It starts at 0.
    """

    owner: str
    purpose: Purpose
    step: int
    slot: int
    replacement: int = 0

    def __str__(self) -> str:
        return f"{self.owner}-{self.purpose}-{self.step}-{self.slot}-{self.replacement}"

    @property
    def id(self) -> GroupId:
        return GroupId(str(self))

    @classmethod
    def parse(cls, group: str) -> "GroupKey":
        """Parse a group id. Raises ValueError when `group` is not one."""
        owner, purpose, step, slot, replacement = group.rsplit("-", 4)
        return cls(owner, Purpose(purpose), int(step), int(slot), int(replacement))


def sample_id(group: GroupId, index: int) -> SampleId:
    """The id of the sample `index` (from 0) of a group."""
    return SampleId(f"{group}.{index}")


def parse_sample_id(sample: str) -> tuple[GroupId, int]:
    """Parse a sample id. Raises ValueError when `sample` is not one."""
    group, _, index = sample.rpartition(".")
    GroupKey.parse(group)
    return GroupId(group), int(index)


def workspace_stream(workspace: str) -> StreamName:
    return StreamName(f"workspace-{workspace}")


def delivery_stream(workspace: str) -> StreamName:
    """The deliveries of a repository's forge, and the requests to look at its refs."""
    return StreamName(f"delivery-{workspace}")


def trigger_stream(workspace: str) -> StreamName:
    return StreamName(f"trigger-{workspace}")


def status_stream(subject: str) -> StreamName:
    """The commit statuses of a run, or of a push that made none (`<workspace>.<number>`)."""
    return StreamName(f"status-{subject}")


def dataset_stream(dataset: str) -> StreamName:
    return StreamName(f"dataset-{dataset}")


def run_stream(run: str) -> StreamName:
    return StreamName(f"run-{run}")


def group_stream(group: str) -> StreamName:
    return StreamName(f"group-{group}")


def grade_stream(group: str) -> StreamName:
    return StreamName(f"grade-{group}")


def policy_stream(run: str) -> StreamName:
    return StreamName(f"policy-{run}")


def checkpoint_stream(run: str) -> StreamName:
    return StreamName(f"checkpoint-{run}")


def eval_stream(evaluation: str) -> StreamName:
    return StreamName(f"eval-{evaluation}")


def verify_stream(verification: str) -> StreamName:
    return StreamName(f"verify-{verification}")


def model_stream() -> StreamName:
    """The deployments of an installation."""
    return StreamName("model-deployments")


def hub_stream(upload: str) -> StreamName:
    """The upload of a checkpoint to a model hub."""
    return StreamName(f"hub-{upload}")


def dead_letter_stream(consumer: str) -> StreamName:
    return StreamName(f"dead-letter-{consumer}")


def category(stream: StreamName) -> str:
    """The stream's category: the part of its name that identifies its owner."""
    return "dead-letter" if stream.startswith("dead-letter-") else stream.partition("-")[0]
