"""The messages that a process of user code may send to us. Any other message is an error of that
process.

User code can reach the pipe, so nothing in it is trusted: types, sizes and counts are checked before a
message is used. `headrace/user_code/user_code_host.py` is the other end.
"""

import base64
from collections.abc import Collection
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headrace.agent_rewards import AGENT_NAME, MOST_AGENTS
from headrace.turn_rewards import LARGEST_REWARD, MOST_TURNS
from schemas.config import LONGEST_RUBRIC, MOST_RUBRICS
from schemas.specs import RolloutKind
from schemas.text import plain

Key = TypeVar("Key")
Value = TypeVar("Value")

LONGEST_TEXT = 8000
MOST_REWARDS = 128
MOST_TOOLS = 128
MOST_SERVERS = 16
MOST_FILES = 32
MOST_FILE_BYTES = 8 << 20
MOST_PRINTED = 66_000
"""Characters of printed text: 64 KiB, and the note that more was printed."""

LARGEST = {"discover": 1 << 20, "workflow": 28 << 20, "grader": 16 << 20, "server": 16 << 20}
"""The largest message in bytes, by the role of the process."""


class ProtocolError(Exception):
    """A process sent something that it may not send; the error text says what."""


def _require_printable(text: str) -> str:
    """Raises ProtocolError for a text that cannot be shown."""
    if not text.isprintable():
        raise ProtocolError(f"it defines {plain(text)!r}, which cannot be shown; rename it")
    return text


def _require_writable(text: str) -> str:
    """Raises ProtocolError for a text that the database cannot hold."""
    if "\0" in text:
        raise ProtocolError("it defines a rubric whose text has a NUL; remove that")
    return text


Id = Annotated[str, Field(max_length=500)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Name = Annotated[str, Field(max_length=100)]
DefinedName = Annotated[Name, AfterValidator(_require_printable)]
Address = Annotated[str, Field(max_length=300), AfterValidator(_require_printable)]
FileName = Annotated[
    str,
    Field(
        max_length=100, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
    ),
]
"""A relative path of plain characters. None of its parts begins with a dot."""

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _HostMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ready(_HostMessage):
    """The entry point is loaded. A rollout server has a `capacity` if it says how many calls it works on
    at the same time."""

    ready: Literal[True]
    capacity: Annotated[int, Field(ge=1)] | None = None


class EntrypointUnusable(_HostMessage):
    """The entry point cannot be used; `unusable` says why."""

    unusable: Text


class DiscoveredRubric(_HostMessage):
    """A function of an entry point that is marked by @rubric, with what it was given."""

    name: DefinedName
    text: Annotated[str, Field(max_length=LONGEST_RUBRIC), AfterValidator(_require_writable)]
    model: Annotated[str, Field(max_length=200), AfterValidator(_require_printable)]
    low: Annotated[float, Field(allow_inf_nan=False)]
    high: Annotated[float, Field(allow_inf_nan=False)]
    base_url: Annotated[str, Field(max_length=500), AfterValidator(_require_printable)] | None = (
        None
    )
    api_key_secret: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$", max_length=64)] | None = None
    usd_per_million: Annotated[list[Price], Field(min_length=2, max_length=2)] | None = None


class Discovered(_HostMessage):
    """The workflow, grader and reward functions that an entry point defines, unless it is a rollout
    server, which is not examined further."""

    kind: RolloutKind = "classes"
    workflow: DefinedName | None = None
    grader: DefinedName | None = None
    rewards: Annotated[list[DefinedName], Field(max_length=MOST_REWARDS)] = []
    tools: Annotated[list[DefinedName], Field(max_length=MOST_TOOLS)] = []
    mcp: Annotated[list[DefinedName], Field(max_length=MOST_SERVERS)] = []
    mcp_addresses: Annotated[list[Address], Field(max_length=MOST_SERVERS)] = []
    rubrics: Annotated[list[DiscoveredRubric], Field(max_length=MOST_RUBRICS)] = []


class DiscoveryFailed(_HostMessage):
    """The entry point could not be examined; `error` says why."""

    error: Text


class Ended(_HostMessage):
    """The process can make no calls any more, for this reason."""

    ended: Text


class ReportedOutput(_HostMessage):
    """The traces of user code in a call. `files` are the bytes of files in base64, by name."""

    stdout: Annotated[str, Field(max_length=MOST_PRINTED)] = ""
    traceback: Annotated[str, Field(max_length=16 << 10)] | None = None
    files: Annotated[dict[FileName, str], Field(max_length=MOST_FILES)] = {}
    is_cut: bool = False


class Stuck(_HostMessage):
    """The event loop is blocked. `stuck` is the id of the call that blocks it, if it is a call. The
    traceback of `output` is the place where it blocks."""

    stuck: Id | None
    output: ReportedOutput | None = None


class Raised(_HostMessage):
    """A call failed."""

    id: Id
    category: Literal["timeout", "raised"]
    error: Text
    output: ReportedOutput | None = None


class ReturnedCall(_HostMessage):
    """A call of a tool in a returned message."""

    id: Name
    name: Name
    arguments: str


class ReturnedMessage(_HostMessage):
    """A message of the conversation that a workflow returned."""

    role: Name
    content: str
    reasoning: str | None = None
    tool_calls: Annotated[list[ReturnedCall], Field(max_length=128)] = []
    tool_call_id: Name | None = None
    name: Name | None = None


TurnNumber = Annotated[int, Field(ge=0, lt=MOST_TURNS)]
AgentName = Annotated[str, Field(pattern=AGENT_NAME)]
OwnReward = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD, allow_inf_nan=False)]


def _require_distinct(pairs: list[tuple[Key, Value]]) -> list[tuple[Key, Value]]:
    """Raises ProtocolError when the first of a pair occurs twice."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ProtocolError("it sent two values for one turn or agent")
    return pairs


class Returned(_HostMessage):
    """A workflow has returned. `turn_rewards` are the rewards that it gave to turns of its attempt,
    `turn_agents` the agents that answered them, and `agent_rewards` the rewards of these agents."""

    id: Id
    messages: Annotated[list[ReturnedMessage], Field(max_length=4096)] | None
    turn_rewards: Annotated[
        list[tuple[TurnNumber, OwnReward]],
        Field(max_length=MOST_TURNS),
        AfterValidator(_require_distinct),
    ] = []
    turn_agents: Annotated[
        list[tuple[TurnNumber, AgentName]],
        Field(max_length=MOST_TURNS),
        AfterValidator(_require_distinct),
    ] = []
    agent_rewards: Annotated[
        list[tuple[AgentName, OwnReward]],
        Field(max_length=MOST_AGENTS),
        AfterValidator(_require_distinct),
    ] = []
    output: ReportedOutput | None = None


class SampleGrade(_HostMessage):
    """The grade of one sample, as its grader returned it."""

    index: Annotated[int, Field(ge=0, lt=1 << 31)]
    reward: Annotated[float, Field(allow_inf_nan=False)] | None
    parts: Annotated[dict[Name, float], Field(max_length=MOST_REWARDS)]
    error: Text | None
    raised: bool = False
    questions: Annotated[dict[Name, str], Field(max_length=MOST_RUBRICS)] = {}


class Served(_HostMessage):
    """A rollout server has made and graded an attempt."""

    id: Id
    grade: SampleGrade
    output: ReportedOutput | None = None


class NotServed(_HostMessage):
    """A rollout server has failed an attempt: it or its code was too slow, its code raised an error, a
    request or an answer was invalid, or the server itself failed. `again` says nothing about the sample,
    which is made again."""

    id: Id
    category: Literal["timeout", "raised", "invalid", "process", "again"]
    error: Text
    output: ReportedOutput | None = None


class Graded(_HostMessage):
    """A grader has returned."""

    id: Id
    grades: Annotated[list[SampleGrade], Field(max_length=4096)]
    output: ReportedOutput | None = None


FirstMessage = Ready | EntrypointUnusable | Discovered | DiscoveryFailed
CallAnswer = Raised | Returned | Served | NotServed | Graded
LaterMessage = Stuck | Ended | CallAnswer

S = TypeVar("S")

_FIRST: dict[str, TypeAdapter[FirstMessage]] = {
    "discover": TypeAdapter(Discovered | DiscoveryFailed),
    "workflow": TypeAdapter(Ready | EntrypointUnusable),
    "grader": TypeAdapter(Ready | EntrypointUnusable),
    "server": TypeAdapter(Ready | EntrypointUnusable),
}
_LATER: dict[str, TypeAdapter[LaterMessage]] = {
    "discover": TypeAdapter(Stuck),
    "workflow": TypeAdapter(Stuck | Raised | Returned),
    "grader": TypeAdapter(Stuck | Raised | Graded),
    "server": TypeAdapter(Ended | Served | NotServed),
}
_ANSWERS: dict[str, TypeAdapter[CallAnswer]] = {
    "workflow": TypeAdapter(Raised | Returned),
    "grader": TypeAdapter(Raised | Graded),
    "server": TypeAdapter(Served | NotServed),
}


def parse_first(role: str, data: bytes) -> FirstMessage:
    """Parse the first message of a process. Raises ProtocolError."""
    return _parse(_FIRST[role], data)


def parse_later(role: str, data: bytes) -> LaterMessage:
    """Parse a message after the first. Raises ProtocolError."""
    return _parse(_LATER[role], data)


def parse_answer(role: str, data: bytes) -> CallAnswer:
    """Parse the answer to a call. Raises ProtocolError."""
    return _parse(_ANSWERS[role], data)


def read_files(output: ReportedOutput) -> dict[str, bytes]:
    """Return the files of an output. Raises ProtocolError when they are not base64, or have more than
    MOST_FILE_BYTES."""
    try:
        files = {name: base64.b64decode(text, validate=True) for name, text in output.files.items()}
    except ValueError:
        raise ProtocolError("it sent a file that is not base64") from None
    if sum(map(len, files.values())) > MOST_FILE_BYTES:
        raise ProtocolError(f"it sent files of more than {MOST_FILE_BYTES} bytes")
    return files


def check_grades(graded: Graded, *, indices: Collection[int], parts: Collection[str]) -> None:
    """Raise ProtocolError unless each grade belongs to one of the given samples, no sample is graded
    twice, and every part belongs to a reward function of the run."""
    seen = [grade.index for grade in graded.grades]
    if len(set(seen)) != len(seen) or not set(seen) <= set(indices):
        raise ProtocolError("it graded a sample twice, or a sample that it did not receive")
    for grade in graded.grades:
        if not set(grade.parts) <= set(parts):
            raise ProtocolError("it returned a reward part that the run does not define")


def _parse(adapter: TypeAdapter[S], data: bytes) -> S:
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise ProtocolError(f"it sent an unknown message: {details['msg']}") from None
