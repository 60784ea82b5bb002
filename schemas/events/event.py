"""The root of all events, and what each of them states.

Events are facts in the past tense. They are frozen and at most 64 KiB large. Tokens, transcripts and
weights are referenced by an ArtifactRef. Each class states its wire type, its version, its Kafka topic,
and (`gate`) whether it opens, pauses or closes the run that it belongs to. A change that adds a field
with a default keeps the version. Any other change raises it and adds a function to
`schemas/events/upcasts.py`. An event that gets another type keeps the one before as `old_type`.
"""

from abc import abstractmethod
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from schemas.ids import StreamName

MAX_EVENT_BYTES = 64 * 1024
"""The largest payload an event may have, as JSON."""

Gate = Literal["open", "paused", "closed", "reopened"]
"""A closed gate stays closed, except that `reopened` opens it."""

Hold = Literal["hold", "release"]
WORKSPACE_TOPIC = "rl.workspace.v1"
RUN_TOPIC = "rl.run.v1"
GROUP_TOPIC = "rl.group.v1"
DEAD_LETTER_TOPIC = "rl.dead-letter.v1"


class Event(BaseModel):
    """Root of all events.

    `stream` is the stream that the event belongs to. The stream's owner, or an edge, appends it
    there. `key` is the Kafka message key. `run_id` names the run, evaluation or workspace that the
    event is about. `name` distinguishes the events that one cause leads to. The cause and the name
    together give the event its id. `old_type` is the type under which earlier releases wrote the event.
    It is still read, and it stays the event's name, so that a repeated request still has the same ids.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    type: ClassVar[str]
    old_type: ClassVar[str | None] = None
    version: ClassVar[int] = 1
    topic: ClassVar[str]
    gate: ClassVar[Gate | None] = None

    @property
    def hold(self) -> Hold | None:
        """Whether the event holds its run, whatever its gate, until a person corrects something, or
        releases it."""
        return None

    @property
    def weight(self) -> int | None:
        """The share of its run when runs take turns in a lane, if the event says it. Without such an
        event it is 1."""
        return None

    @property
    def needed_decider(self) -> int:
        """The lowest decider version of the processes that may work on its run, if the event says it.
        Without such an event it is 1."""
        return 1

    @property
    @abstractmethod
    def stream(self) -> StreamName: ...

    @property
    @abstractmethod
    def run_id(self) -> str: ...

    @property
    def key(self) -> str:
        return self.run_id

    @property
    def name(self) -> str:
        return self.old_type or self.type
