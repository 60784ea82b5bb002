"""What a process of user code may say to us, strictly. Whatever else it says is that process's fault.

Its pipe is in reach of user code, so nothing here is trusted: types, sizes and counts are checked
before a message is looked at. `headrace/host.py` is the other end.
"""

from collections.abc import Collection
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

LONGEST_TEXT = 8000
MOST_REWARDS = 128
LARGEST = {"discover": 1 << 20, "workflow": 16 << 20, "grader": 4 << 20}
"""Bytes of one message, by the process's role."""

Id = Annotated[str, Field(max_length=500)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Name = Annotated[str, Field(max_length=100)]


class ProtocolError(Exception):
    """A process said something that it may not say. The message is about its fault."""


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ready(_Said):
    """The entry point is loaded."""

    ready: Literal[True]


class Unusable(_Said):
    """The entry point cannot be used, and why."""

    unusable: Text


class Found(_Said):
    """What an entry point holds."""

    workflow: Name | None = None
    grader: Name | None = None
    rewards: Annotated[list[Name], Field(max_length=MOST_REWARDS)] = []


class Broken(_Said):
    """Why an entry point could not be looked into."""

    error: Text


class Stuck(_Said):
    """The loop does not turn; `stuck` is the call that holds it, if it is one."""

    stuck: Id | None


class Raised(_Said):
    """A call failed."""

    id: Id
    category: Literal["timeout", "raised"]
    error: Text


class Spoken(_Said):
    """A message of the conversation that a workflow returned."""

    role: Name
    content: str


class Returned(_Said):
    """A workflow is done."""

    id: Id
    messages: Annotated[list[Spoken], Field(max_length=4096)] | None


class Paid(_Said):
    """The grade of one sample."""

    index: Annotated[int, Field(ge=0, lt=1 << 31)]
    reward: Annotated[float, Field(allow_inf_nan=False)] | None
    parts: Annotated[dict[Name, float], Field(max_length=MOST_REWARDS)]
    error: Text | None
    raised: bool = False


class Graded(_Said):
    """A grader is done."""

    id: Id
    grades: Annotated[list[Paid], Field(max_length=4096)]


First = Ready | Unusable | Found | Broken
Later = Stuck | Raised | Returned | Graded

S = TypeVar("S")

_FIRST: dict[str, TypeAdapter[First]] = {
    "discover": TypeAdapter(Found | Broken),
    "workflow": TypeAdapter(Ready | Unusable),
    "grader": TypeAdapter(Ready | Unusable),
}
_LATER: dict[str, TypeAdapter[Later]] = {
    "discover": TypeAdapter(Stuck),
    "workflow": TypeAdapter(Stuck | Raised | Returned),
    "grader": TypeAdapter(Stuck | Raised | Graded),
}


def first(role: str, data: bytes) -> First:
    """The first message of a process. Raises ProtocolError."""
    return _parsed(_FIRST[role], data)


def later(role: str, data: bytes) -> Later:
    """A message after it. Raises ProtocolError."""
    return _parsed(_LATER[role], data)


def check_grades(graded: Graded, *, indices: Collection[int], parts: Collection[str]) -> None:
    """Raises ProtocolError unless the grades are of the samples that were given, once each, and hold no
    part but the named reward functions."""
    seen = [grade.index for grade in graded.grades]
    if len(set(seen)) != len(seen) or not set(seen) <= set(indices):
        raise ProtocolError("it graded a sample twice, or one that it was not given")
    for grade in graded.grades:
        if not set(grade.parts) <= set(parts):
            raise ProtocolError("it returned parts of a reward that the run does not name")


def _parsed(adapter: TypeAdapter[S], data: bytes) -> S:
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise ProtocolError(
            f"it sent a message that is not one of ours: {details['msg']}"
        ) from None
