"""Names of things, and how new ids are derived.

Every id that Headrace makes is derived from its cause. Repeating something after a crash therefore
makes the same id, and the keys of the database can reject the second copy. Nothing here is random.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType
from uuid import UUID, uuid5

from schemas.errors import InvalidConfig, Issue

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

ArtifactKind = Literal["capability", "task", "model"]
"""The kinds of versioned artifacts."""

LONGEST_VERSION = 64
"""Characters that a version has at most."""

NUMBER = r"(?:0|[1-9][0-9]*)"
IDENTIFIER = rf"(?:{NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
VERSION_FORM = re.compile(
    rf"({NUMBER})\.({NUMBER})\.({NUMBER})(?:-({IDENTIFIER}(?:\.{IDENTIFIER})*))?"
)

AFTER_PRERELEASES = "~"
"""Sorts after all that a pre-release begins with."""


class Purpose(StrEnum):
    """Why a group is generated."""

    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class SemanticVersion:
    """A version: its three numbers, and the identifiers of a pre-release, none for a release."""

    numbers: tuple[int, int, int]
    prerelease: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SemanticVersion":
        """Parse a version. Raises InvalidConfig for other texts. Build metadata (`+...`) is refused,
        because it takes no part in the order and is not allowed in tags of container registries."""
        match = VERSION_FORM.fullmatch(text) if len(text) <= LONGEST_VERSION else None
        if match is None:
            message = (
                f"must be a semantic version of at most {LONGEST_VERSION} characters, like 1.2.0 or "
                f"2.0.0-rc.1, without build metadata, got {text[:80]!r}"
            )
            raise InvalidConfig(f"version {message}", issues=(Issue("version", message),))
        major, minor, patch, rest = match.groups()
        numbers = (int(major), int(minor), int(patch))
        return cls(numbers, tuple(rest.split(".")) if rest else ())

    @property
    def is_prerelease(self) -> bool:
        return bool(self.prerelease)

    @property
    def precedence(self) -> str:
        """A text of ASCII characters. Sorted by their code points, these texts are in the order of
        precedence of their versions."""
        numbers = "".join(map(_sortable, map(str, self.numbers)))
        if not self.prerelease:
            return numbers + AFTER_PRERELEASES
        # A number is lower than a word. `!` is lower than all that a word has.
        rest = (f"0{_sortable(one)}" if one.isdigit() else f"1{one}" for one in self.prerelease)
        return numbers + "".join(f"{one}!" for one in rest)

    def __str__(self) -> str:
        text = ".".join(map(str, self.numbers))
        return f"{text}-{'.'.join(self.prerelease)}" if self.prerelease else text


def _sortable(digits: str) -> str:
    """The digits of a number after their count, so that longer numbers sort after shorter ones."""
    return f"{len(digits):02d}{digits}"


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


REFUTED = 1000
"""The number that is added to the replacement of a group each time that it is generated again because
samples were refuted. A slot has far fewer replacements (`advanced.max_replacements`)."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identifies a group: the G samples of one dataset row, for one slot of one step.

    `owner` is the run or the evaluation that requested it. `replacement` counts the groups that
    were dropped from this slot before. It starts at 0. A group whose samples were refuted is generated
    again with the same draws, and REFUTED is added to its replacement each time.
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

    @property
    def number(self) -> int:
        """How many groups were dropped from the slot before, however often samples were refuted."""
        return self.replacement % REFUTED

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


def artifact_stream(artifact: str) -> StreamName:
    """A version of a capability, a task or a model."""
    return StreamName(f"artifact-{artifact}")


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


def regrade_stream(regrade: str) -> StreamName:
    """The new grades of a run's recorded samples."""
    return StreamName(f"regrade-{regrade}")


def gradients_stream(regrade: str) -> StreamName:
    """The comparison of the policy gradients of a regrade with those of its run."""
    return StreamName(f"gradients-{regrade}")


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
