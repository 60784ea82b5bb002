"""The embedded bus: consumers are woken by the log itself.

It is the reconciler without the wait: from the oldest watermark of its consumers it tails the log below
the horizon, drops what the inbox holds, and hands out the rest. What is acknowledged lies below its
cursor, and the watermarks follow. Several processes may host the same consumer: the inbox decides.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence

from infra.notify import Notifier, Wakeup
from infra.ports import Cursor, EventLog, Recorded
from schemas.ids import ConsumerName

BATCH = 100
SLOW_POLL_S = 5.0
"""How often the log is looked at when nothing wakes us; a lost wake-up costs this much."""

ADVANCE_S = 2.0
"""Watermarks move at most this often; until then the inbox remembers."""

Delivered = Sequence[tuple[ConsumerName, Recorded]]


class EmbeddedBus:
    """`infra.ports.Bus` over the log's tail. One subscription per instance, one batch at a time."""

    def __init__(self, log: EventLog, notifier: Notifier) -> None:
        self._log = log
        self._wakeup: Wakeup = notifier.subscribe()
        self._cursor = Cursor()
        self._next = Cursor()
        self._names: tuple[ConsumerName, ...] = ()
        self._types: list[str] = []
        self._advanced = 0.0
        self._moved = False

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncIterator[Delivered]:
        self._names = tuple(consumers)
        self._types = sorted({kind for kinds in consumers.values() for kind in kinds})
        marks = {name: await self._log.watermark(name) for name in consumers}
        self._cursor = self._next = min(marks.values(), default=Cursor())
        while True:
            events, self._next = await self._log.tail(self._cursor, limit=BATCH, types=self._types)
            if self._next == self._cursor:
                await self._advance()
                await self._wakeup.wait(SLOW_POLL_S)
                continue
            wanted = [
                (name, recorded)
                for recorded in events
                for name, kinds in consumers.items()
                if recorded.type in kinds and recorded.cursor > marks[name]
            ]
            known = await self._log.consumed([(name, r.id) for name, r in wanted]) if wanted else ()
            batch = [(name, r) for name, r in wanted if (name, r.id) not in known]
            if batch:
                yield batch
            else:
                await self.acknowledge(batch)

    async def acknowledge(self, batch: Delivered) -> None:
        self._cursor = self._next
        self._moved = True
        if time.monotonic() - self._advanced > ADVANCE_S:
            await self._advance()

    async def idle(self) -> bool:
        events, _ = await self._log.tail(self._cursor, limit=BATCH, types=self._types)
        return not events

    async def _advance(self) -> None:
        if not self._moved:
            return
        self._moved = False
        self._advanced = time.monotonic()
        for name in self._names:
            await self._log.advance(name, self._cursor)
