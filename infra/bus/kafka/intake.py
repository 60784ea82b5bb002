"""From fetched records to what is due: whose records they are, which events they name, what is done.

One read answers a whole batch: the events the records name, and who has not consumed them. What the
log holds is delivered, as the log holds it, whatever the record's body says; so a damaged copy loses
nothing, and a record that names nothing in the log decides nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiokafka.structs import ConsumerRecord

from infra.bus.kafka.records import Address, Unreadable, address, texts
from infra.bus.kafka.unusable_records import Stray, keep
from infra.bus.reconciler import Delivered
from infra.ports.event_log import Cursor, Encoded, EventLog, Recorded
from infra.postgres.skipped_records import Skips
from schemas.envelope import BadEvent, decode_event
from schemas.events import EVENT_TYPES
from schemas.ids import ConsumerName, EventId, StreamName

FOREIGN_TYPE = "foreign type"
NOT_IN_THE_LOG = "not in the log"
DAMAGED = "damaged body"
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Named:
    """A record with the event it names."""

    address: Address
    record: ConsumerRecord
    readers: tuple[ConsumerName, ...]


class Intake:
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
        """Remember the watermarks as they stand: records of events below need no look at all."""
        self._marks = {name: await self._log.watermark(name) for name in self._marks}

    async def due(self, records: Sequence[ConsumerRecord]) -> Delivered:
        """What these records ask of the consumers and is not consumed; each message once."""
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
                await self._stray(found)
                continue
            await self._compare(found, event)
            messages |= {(name, event.id): event for name in found.readers if name in due}
        return [(name, event) for (name, _), event in messages.items()]

    async def _read(self, record: ConsumerRecord) -> Named | None:
        """Whom a record is for; None when it is for nobody here."""
        try:
            found = address(texts(record.headers))
        except Unreadable as error:
            await self._skips.add(UNREADABLE, _place(record))
            await keep(self._log, _stray(record), str(error))
            return None
        if found.type not in EVENT_TYPES:
            await self._skips.add(FOREIGN_TYPE, f"{found.type[:100]} at {_place(record)}")
            return None
        readers = tuple(
            name
            for name in self._readers.get(found.type, ())
            if found.cursor is None or found.cursor > self._marks[name]
        )
        return Named(found, record, readers) if readers else None

    async def _stray(self, found: Named) -> None:
        """A record of an event that the log does not hold: another installation's, or of a past that
        was restored away, when it can be read; else who knows."""
        cause = _unfit(found)
        if cause is None:
            await self._skips.add(NOT_IN_THE_LOG, _place(found.record))
            return
        await self._skips.add(UNREADABLE, _place(found.record))
        await keep(self._log, _stray(found.record), cause)

    async def _compare(self, found: Named, event: Recorded) -> None:
        payload = event.payload
        if not isinstance(payload, Encoded):
            return
        data = payload.data if isinstance(payload.data, bytes) else payload.data.encode()
        if data != found.record.value:
            await self._skips.add(DAMAGED, f"{_place(found.record)}: the log's {event.id} is used")


def _unfit(found: Named) -> str | None:
    """Why a body is no event of its type, or None."""
    version = texts(found.record.headers).get("ce_dataversion", "")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        return f"its header ce_dataversion is no number: {version[:50]!r}"
    try:
        decode_event(found.address.type, int(version), found.record.value or b"")
    except BadEvent as error:
        return str(error)
    return None


def _stray(record: ConsumerRecord) -> Stray:
    return Stray(
        place=_place(record),
        headers=texts(record.headers),
        key=record.key or b"",
        value=record.value or b"",
    )


def _place(record: ConsumerRecord) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"
