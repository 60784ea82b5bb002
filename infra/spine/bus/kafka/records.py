"""An event as a Kafka record: CloudEvents 1.0 in binary mode (attributes as headers, value = payload).

A record that comes back from Kafka only *names* an event (`EventAddress`). The event itself is read from
the log, so nothing on a topic can add to what the log holds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from infra.settings.kafka import KafkaSettings
from infra.spine.ports.event_log import Cursor, Encoded, Recorded
from schemas.envelope import EVENT_TYPES, SOURCE, BadEvent, NewerEvent, current_type
from schemas.ids import EventId, StreamName

PARENT = "traceparent"


class UnreadableRecord(ValueError):
    """A record whose headers do not name an event; the message says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Record:
    """The content of a Kafka record."""

    topic: str
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Which event a record is about, according to its headers."""

    id: EventId
    type: str
    stream: StreamName
    version: int
    cursor: Cursor | None

    @property
    def place(self) -> tuple[StreamName, int]:
        """Its stream and its version there."""
        return self.stream, self.version


def to_record(recorded: Recorded, settings: KafkaSettings) -> Record:
    """An event of the log as a record."""
    payload = recorded.payload
    if not isinstance(payload, Encoded):
        payload = Encoded(payload.type, payload.version, payload.model_dump_json())
    data = payload.data if isinstance(payload.data, bytes) else payload.data.encode()
    attributes = {
        "ce_specversion": "1.0",
        "ce_id": str(recorded.id),
        "ce_source": SOURCE,
        "ce_type": payload.type,
        "ce_subject": recorded.stream,
        "ce_time": recorded.time.isoformat(),
        "ce_dataversion": str(payload.version),
        "ce_streamversion": str(recorded.version),
        "ce_runid": recorded.run,
        "ce_correlationid": str(recorded.correlation),
        "ce_causationid": str(recorded.causation) if recorded.causation else None,
        "ce_actor": recorded.actor,
        "ce_cursor": str(recorded.cursor),
        "content-type": "application/json",
        PARENT: recorded.traceparent,
    }
    return Record(
        topic=settings.prefix + EVENT_TYPES[payload.type].topic,
        key=_key(recorded).encode(),
        value=data,
        headers=tuple((name, text.encode()) for name, text in attributes.items() if text),
    )


def _key(recorded: Recorded) -> str:
    """The record's key, which keeps the events of one thing in order. If the payload has a version from
    the future (a newer Headrace writes, an older one publishes), the key is its run."""
    try:
        return recorded.event.key
    except (BadEvent, NewerEvent):
        return recorded.run


def headers_as_text(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """Headers as text. The first header of a name counts."""
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name, (value or b"").decode(errors="backslashreplace"))
    return found


def parse_address(headers: Mapping[str, str]) -> EventAddress:
    """The event that these headers name. Raises UnreadableRecord."""
    for name in ("ce_id", "ce_type", "ce_subject", "ce_streamversion"):
        if not headers.get(name):
            raise UnreadableRecord(f"it has no header {name}")
    version = headers["ce_streamversion"]
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise UnreadableRecord(f"its header ce_streamversion is not a number: {version[:50]!r}")
    return EventAddress(
        id=_id(headers["ce_id"]),
        type=current_type(headers["ce_type"]),
        stream=StreamName(headers["ce_subject"]),
        version=int(version),
        cursor=_cursor(headers.get("ce_cursor", "")),
    )


def _id(text: str) -> EventId:
    try:
        return EventId(UUID(text))
    except ValueError as error:
        raise UnreadableRecord(f"its header ce_id is not a UUID: {text[:50]!r}") from error


def _cursor(text: str) -> Cursor | None:
    """Where the event lies in the log. It only saves work, so a missing or bad one is None."""
    try:
        return Cursor.parse(text)
    except ValueError:
        return None
