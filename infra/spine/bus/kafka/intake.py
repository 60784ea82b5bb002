"""Turns fetched records into messages: finds the events that they name and the consumers that read them.

One query returns, for a whole batch, the events that the records name and the consumers that have not
consumed them. Events are delivered as the log holds them, and the body of a record is not used. So a
damaged copy loses nothing, and a record that names no event of the log has no effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiokafka.structs import ConsumerRecord

from infra.spine.bus.kafka.records import (
    EventAddress,
    UnreadableRecord,
    headers_as_text,
    parse_address,
)
from infra.spine.bus.kafka.unusable_records import UnusableRecord, keep_as_dead_letter
from infra.spine.bus.reconciler import Delivered
from infra.spine.ports.event_log import Cursor, Encoded, EventLog, Recorded
from infra.spine.postgres.skipped_records import Skips
from schemas.envelope import EVENT_TYPES, BadEvent, NewerEvent, decode_event
from schemas.ids import ConsumerName, EventId, StreamName

FOREIGN_TYPE = "foreign type"
NOT_IN_THE_LOG = "not in the log"
DAMAGED = "damaged body"
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class NamedRecord:
    """A record, the event that it names, and the consumers here that read it."""

    address: EventAddress
    record: ConsumerRecord
    readers: tuple[ConsumerName, ...]


class RecordIntake:
    """Turns records into messages for the hosted consumers."""

    def __init__(
        self, log: EventLog, consumers: Mapping[ConsumerName, Sequence[str]], skips: Skips
    ) -> None:
        self._log = log
        self._skips = skips
        self._marks = dict.fromkeys(consumers, Cursor())
        self._readers: dict[str, list[ConsumerName]] = {}
        for name, kinds in consumers.items():
            for kind in kinds:
                self._readers.setdefault(kind, []).append(name)

    async def open(self) -> None:
        """Read the watermarks: records of events below them are skipped without a query."""
        self._marks = {name: await self._log.watermark(name) for name in self._marks}

    async def unconsumed(self, records: Sequence[ConsumerRecord]) -> Delivered:
        """The messages that these records name and that are not consumed yet, each of them once."""
        named = [found for record in records if (found := await self._read(record))]
        if not named:
            return ()
        readers: dict[tuple[StreamName, int], set[ConsumerName]] = {}
        for found in named:
            readers.setdefault(found.address.place, set()).update(found.readers)
        events = {event.id: (event, due) for event, due in await self._log.unconsumed_at(readers)}
        messages: dict[tuple[ConsumerName, EventId], Recorded] = {}
        for found in named:
            event, due = events.get(found.address.id, (None, ()))
            if event is None:
                await self._skip_unknown(found)
                continue
            await self._report_damage(found, event)
            messages |= {(name, event.id): event for name in found.readers if name in due}
        return [(name, event) for (name, _), event in messages.items()]

    async def _read(self, record: ConsumerRecord) -> NamedRecord | None:
        """The event and the readers of a record; None when no consumer here needs it."""
        try:
            found = parse_address(headers_as_text(record.headers))
        except UnreadableRecord as error:
            await self._skips.add(UNREADABLE, _place(record))
            await keep_as_dead_letter(self._log, _unusable(record), str(error))
            return None
        if found.type not in EVENT_TYPES:
            await self._skips.add(FOREIGN_TYPE, f"{found.type[:100]} at {_place(record)}")
            return None
        readers = tuple(
            name
            for name in self._readers.get(found.type, ())
            if found.cursor is None or found.cursor > self._marks[name]
        )
        return NamedRecord(found, record, readers) if readers else None

    async def _skip_unknown(self, found: NamedRecord) -> None:
        """Skip a record whose event is not in the log. If it can be read, it is from another
        installation or from before a restore. Else it is unreadable, and becomes a dead letter."""
        cause = _why_unreadable(found)
        if cause is None:
            await self._skips.add(NOT_IN_THE_LOG, _place(found.record))
            return
        await self._skips.add(UNREADABLE, _place(found.record))
        await keep_as_dead_letter(self._log, _unusable(found.record), cause)

    async def _report_damage(self, found: NamedRecord, event: Recorded) -> None:
        payload = event.payload
        if not isinstance(payload, Encoded):
            return
        data = payload.data if isinstance(payload.data, bytes) else payload.data.encode()
        if data != found.record.value:
            await self._skips.add(DAMAGED, f"{_place(found.record)}: the log's {event.id} is used")


def _why_unreadable(found: NamedRecord) -> str | None:
    """Why a body is not an event of its type; None when it is one."""
    version = headers_as_text(found.record.headers).get("ce_dataversion", "")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        return f"its header ce_dataversion is not a number: {version[:50]!r}"
    try:
        decode_event(found.address.type, int(version), found.record.value or b"")
    except (BadEvent, NewerEvent) as error:
        return str(error)
    return None


def _unusable(record: ConsumerRecord) -> UnusableRecord:
    return UnusableRecord(
        place=_place(record),
        headers=headers_as_text(record.headers),
        key=record.key or b"",
        value=record.value or b"",
    )


def _place(record: ConsumerRecord) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"
