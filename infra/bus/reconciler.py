"""The reconciler: what a consumer reads and nothing brought to it, it gets from the log itself.

Behind a bus that may lose everything (a broker whose disk is gone, or that is not there at all) it is
what keeps runs going: events below the horizon, above the watermark, without an inbox row, that lie
there for some seconds, go to the intake. Everything up to where it is has been consumed, so the
watermarks follow it, and inbox rows below them are deleted. The embedded bus is the same tail without
the wait (`infra/bus/embedded.py`).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from infra import failpoints
from infra.bus.tail_wait import SLOW_POLL_S
from infra.ports.event_log import Cursor, EventLog, Recorded
from infra.postgres.history import Turned, as_of
from infra.postgres.notify import Wakeup
from schemas.ids import ConsumerName

BATCH = 100

ADVANCE_S = 2.0
"""Watermarks move at most this often; until then the inbox remembers."""

WAIT_S = 3.0
"""How long the bus has to bring an event before the reconciler does."""

SAMPLE_S = 0.5

HEAD_S = 5.0
"""How often who has nothing to read looks whether the log still reaches to where it is."""

Delivered = Sequence[tuple[ConsumerName, Recorded]]


class Tail:
    """The messages of the log, in its order, that some consumers have not consumed; and how far they
    have consumed everything."""

    def __init__(self, log: EventLog, consumers: Mapping[ConsumerName, Sequence[str]]) -> None:
        self._log = log
        self._consumers = consumers
        self._types = sorted({kind for kinds in consumers.values() for kind in kinds})
        self._next = Cursor()
        self._advanced_at = 0.0
        self._moved = False
        self._turn = 0
        self._looked_at = 0.0
        self.cursor = Cursor()
        self.full = False
        """Whether the last page was: then there may be another behind it."""

    async def open(self) -> None:
        """Start from the oldest watermark. From here on everything is asked as of this turn of the log's
        history: it raises Turned once there is another, and who subscribes again starts from there."""
        self._turn, self._looked_at = self._log.turns, time.monotonic()
        self.cursor = self._next = await self._oldest()

    async def page(self, *, upto: Cursor | None = None) -> Delivered | None:
        """What is due on the next page; None when there is no page (up to `upto`). The page is to be
        `passed` before the next is asked for, also when nothing on it is due."""
        with as_of(self._turn):
            events, after = await self._log.tail(self.cursor, limit=BATCH, upto=upto)
        if after <= self.cursor and time.monotonic() >= self._looked_at + HEAD_S:
            await self.look()
        self.full = len(events) == BATCH
        if upto is not None and after == self.cursor:
            after = upto  # there is nothing between
        if after <= self.cursor:
            return None
        self._next = after
        return await self._due(events)

    async def passed(self) -> None:
        """Everything on the page is consumed."""
        self.cursor = self._next
        self._moved = True
        await self.advance()

    async def advance(self) -> float:
        """Move the watermarks here, if it is time; how many seconds may pass until it is again."""
        if not self._moved:
            return SLOW_POLL_S
        left_s = self._advanced_at + ADVANCE_S - time.monotonic()
        if left_s > 0:
            return left_s
        self._moved = False
        self._advanced_at = time.monotonic()
        with as_of(self._turn):
            await self._log.advance(list(self._consumers), self.cursor)
        return SLOW_POLL_S

    async def look(self) -> Cursor:
        """The end of the log. Raises Turned when the log has gone back below where we are."""
        with as_of(self._turn):
            head = await self._log.visible_head()
            if time.monotonic() >= self._looked_at + HEAD_S:
                self._looked_at = time.monotonic()
                if not await self._log.reaches(self.cursor) and await self._oldest() < self.cursor:
                    raise Turned
        return head

    async def _oldest(self) -> Cursor:
        with as_of(self._turn):
            marks = [await self._log.watermark(name) for name in self._consumers]
        return min(marks, default=Cursor())

    async def clear(self) -> bool:
        """Whether nothing above the cursor is due."""
        cursor = self.cursor
        while True:
            events, after = await self._log.tail(cursor, limit=BATCH, types=self._types)
            if after == cursor:
                return True
            if await self._due(events):
                return False
            cursor = after

    async def _due(self, events: Sequence[Recorded]) -> Delivered:
        return await self._log.unconsumed(
            [
                (name, recorded)
                for recorded in events
                for name, kinds in self._consumers.items()
                if recorded.type in kinds
            ]
        )


class Reconciler:
    """`infra.ports.bus.Bus` for what another bus did not bring within `wait_s`.

    How long an event lies there is told by our own monotonic clock, from when its place in the log was
    first seen below the horizon: no clock that someone can set decides about it.
    """

    def __init__(self, log: EventLog, wakeup: Wakeup, *, wait_s: float = WAIT_S) -> None:
        self._log = log
        self._wakeup = wakeup
        self._wait_s = wait_s
        self._heads: deque[tuple[float, Cursor]] = deque()
        self._bound = Cursor()
        self._tail = Tail(log, {})
        self.delivered = 0

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Delivered, None]:
        self._tail = Tail(self._log, consumers)
        await self._tail.open()
        self._heads.clear()
        self._bound = Cursor()
        while True:
            await self._until_old(self._tail.cursor)
            batch = await self._tail.page(upto=self._bound)
            if batch:
                failpoints.hit("reconcile.found")
                self.delivered += len(batch)
                yield batch
            elif batch is not None:
                await self._pass()

    async def acknowledge(self, batch: Delivered) -> None:
        await self._pass()

    async def idle(self) -> bool:
        return await self._tail.clear()

    async def _pass(self) -> None:
        failpoints.hit("reconcile.before_advance")
        await self._tail.passed()
        failpoints.hit("reconcile.after_advance")

    async def _until_old(self, after: Cursor) -> None:
        """Return once something above `after` has lain there for long enough; `_bound` says what."""
        while self._bound <= after:
            left_s = await self._tail.advance()
            await self._sample()
            if not self._heads:
                await self._wakeup.wait(left_s)
                continue
            seen_at, head = self._heads[0]
            left_s = seen_at + self._wait_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, SAMPLE_S))
                continue
            self._heads.popleft()
            self._bound = head

    async def _sample(self) -> None:
        """Remember where the log ends now, if it has grown."""
        head = await self._tail.look()
        known = self._heads[-1][1] if self._heads else max(self._bound, self._tail.cursor)
        if head > known:
            self._heads.append((time.monotonic(), head))
