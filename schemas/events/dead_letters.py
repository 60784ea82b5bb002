"""Events of messages that could not be processed."""

from typing import ClassVar
from uuid import UUID

from schemas.artifact_refs import ArtifactRef
from schemas.events.event import DEAD_LETTER_TOPIC, Event, Hold
from schemas.ids import StreamName, dead_letter_stream


class MessageDeadLettered(Event):
    """A message that `consumer` could not process was put aside. No other message waits for it.
    `message_id` is the id of the event (for an outcome, of the effect). `message_stream` and
    `message_version` are its place in the log. `payload` shows its bytes; if they are too long,
    `content` holds all of them. `headers` are the message's headers, and `trace` is the traceback of the
    failure. `pauses` means that its run waits until the message is delivered again."""

    type: ClassVar[str] = "rl.dead-letter.message"
    topic: ClassVar[str] = DEAD_LETTER_TOPIC
    consumer: str
    message_id: UUID
    message_type: str
    about: str
    cause: str
    payload: str
    headers: dict[str, str] = {}
    traceparent: str | None = None
    message_stream: StreamName = StreamName("")
    message_version: int = 0
    content: ArtifactRef | None = None
    trace: str = ""
    pauses: bool = False

    @property
    def stream(self) -> StreamName:
        return dead_letter_stream(self.consumer)

    @property
    def run_id(self) -> str:
        return self.about

    @property
    def name(self) -> str:
        return f"{self.type}/{self.message_id}"

    @property
    def hold(self) -> Hold | None:
        return "hold" if self.pauses else None


class MessageRedriven(Event):
    """A dead letter is delivered again, only to the consumer that failed on it. Its run continues.
    `letter` is the id of the MessageDeadLettered event."""

    type: ClassVar[str] = "rl.dead-letter.redriven"
    topic: ClassVar[str] = DEAD_LETTER_TOPIC
    consumer: str
    letter: UUID
    message_id: UUID
    message_stream: StreamName
    message_version: int
    about: str
    paused: bool

    @property
    def stream(self) -> StreamName:
        return dead_letter_stream(self.consumer)

    @property
    def run_id(self) -> str:
        return self.about

    @property
    def name(self) -> str:
        return f"{self.type}/{self.letter}"

    @property
    def hold(self) -> Hold | None:
        return "release" if self.paused else None
