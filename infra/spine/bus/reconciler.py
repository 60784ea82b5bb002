"""The reconciler: delivers events from the log itself that the bus did not deliver.

It keeps runs going behind a bus that may lose everything (a broker that lost its disk, or is not there).
An event goes to the intake when it lies below the horizon and above the watermark, has no inbox row, and
has been there for some seconds. Everything before the reconciler's cursor is consumed, so the watermarks
follow it, and inbox rows below them are deleted. The embedded bus is the same tail without the wait
(`infra/spine/bus/embedded.py`).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from infra import failpoints
from infra.spine.bus.tail_wait import SLOW_POLL_S
from infra.spine.ports.event_log import Cursor, EventLog, Recorded
from infra.spine.postgres.history import HistoryChanged, as_of
from infra.spine.postgres.notify import Wakeup
from schemas.envelope import EVENT_TYPES
from schemas.ids import ConsumerName

BATCH = 100

ADVANCE_S = 2.0
"""Watermarks move at most this often. Until then inbox rows remember what is consumed."""

WAIT_S = 3.0
"""How long the bus has to deliver an event before the reconciler does."""

SAMPLE_S = 0.5

HEAD_S = 5.0
"""How often an idle tail checks that the log still reaches its cursor."""

Delivered = Sequence[tuple[ConsumerName, Recorded]]


class Tail:
    """The messages of the log that some consumers have not consumed, in the log's order, and the cursor
    up to which they have consumed everything.

    Messages that only a newer release can decide on are left: the tail reads on, and the watermarks stay
    below the first of them. Once a newer process has consumed that one, the tail reads again from there,
    to find the next."""

    def __init__(self, log: EventLog, consumers: Mapping[ConsumerName, Sequence[str]]) -> None:
        self._log = log
        self._consumers = consumers
        self._types = sorted({kind for kinds in consumers.values() for kind in kinds})
        self._next = Cursor()
        self._advanced_at = 0.0
        self._moved = False
        self._history_epoch = 0
        self._looked_at = 0.0
        self._left: Delivered = ()
        self.cursor = Cursor()
        self.last_page_was_full = False
        """If so, there may be another page after it."""

    async def open(self) -> None:
        """Start from the oldest watermark. Every later read is bound to the current epoch of the log's
        history, and raises HistoryChanged in another one. A new subscription then starts over."""
        self._history_epoch, self._looked_at = self._log.history_epoch, time.monotonic()
        self.cursor = self._next = await self._oldest()
        self._left = ()

    async def next_page(self, *, upto: Cursor | None = None) -> Delivered | None:
        """The unconsumed messages of the next page; None when there is no page (up to `upto`). Call
        `mark_consumed` before asking for the next page, also when this one holds nothing."""
        with as_of(self._history_epoch):
            events, after = await self._log.tail(self.cursor, limit=BATCH, upto=upto)
        if after <= self.cursor and time.monotonic() >= self._looked_at + HEAD_S:
            await self.check_head()
        self.last_page_was_full = len(events) == BATCH
        if upto is not None and after == self.cursor:
            after = upto  # there is nothing between the cursor and `upto`
        if after <= self.cursor:
            return None
        self._next = after
        return await self._unconsumed(events)

    async def mark_consumed(self, left: Delivered = ()) -> None:
        """Record that everything on the page is consumed, except `left`."""
        self.cursor = self._next
        if left and not self._left:
            first = min(recorded.cursor for _, recorded in left)
            self._left = [message for message in left if message[1].cursor == first]
        self._moved = True
        await self.advance()

    async def advance(self) -> float:
        """Move the watermarks to the cursor if it is time. Returns the seconds until the next time."""
        if not self._moved:
            return SLOW_POLL_S
        left_s = self._advanced_at + ADVANCE_S - time.monotonic()
        if left_s > 0:
            return left_s
        self._moved = False
        self._advanced_at = time.monotonic()
        with as_of(self._history_epoch):
            await self._log.advance(list(self._consumers), await self._consumed_up_to())
        return SLOW_POLL_S

    async def _consumed_up_to(self) -> Cursor:
        """The cursor up to which nothing is left. If newer processes have consumed what was left first,
        reading goes back to there."""
        if not self._left:
            return self.cursor
        _, first = self._left[0]
        before = Cursor(first.cursor.xid, first.cursor.position - 1)
        if not await self._log.unconsumed(self._left):
            self._left = ()
            self.cursor = self._next = before
        return before

    async def check_head(self) -> Cursor:
        """The end of the log. Raises HistoryChanged when the log now ends below the cursor."""
        with as_of(self._history_epoch):
            head = await self._log.visible_head()
            if time.monotonic() >= self._looked_at + HEAD_S:
                self._looked_at = time.monotonic()
                if not await self._log.reaches(self.cursor) and await self._oldest() < self.cursor:
                    raise HistoryChanged
        return head

    async def _oldest(self) -> Cursor:
        with as_of(self._history_epoch):
            marks = [await self._log.watermark(name) for name in self._consumers]
        return min(marks, default=Cursor())

    async def has_nothing_due(self) -> bool:
        """Whether nothing above the cursor is unconsumed. What the horizon hides may be, and anything
        before there is a subscription."""
        if not self._consumers:
            return False
        cursor = self.cursor
        while True:
            events, after = await self._log.tail(cursor, limit=BATCH, types=self._types)
            if after == cursor:
                return not await self._log.has_events_after(cursor)
            if await self._unconsumed([event for event in events if event.is_known]):
                return False
            cursor = after

    async def _unconsumed(self, events: Sequence[Recorded]) -> Delivered:
        """The messages of these events that are not consumed. Nobody here knows who reads a type of a
        newer release, so such an event is a message for every consumer."""
        return await self._log.unconsumed(
            [
                (name, recorded)
                for recorded in events
                for name, kinds in self._consumers.items()
                if recorded.type in kinds or recorded.type not in EVENT_TYPES
            ]
        )


class Reconciler:
    """`infra.spine.ports.bus.Bus` for events that another bus did not deliver within `wait_s`.

    An event's age is measured with this process's monotonic clock, from when its place in the log was
    first seen below the horizon. So changing a wall clock has no effect on it.
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
            await self._wait_until_old(self._tail.cursor)
            batch = await self._tail.next_page(upto=self._bound)
            if batch:
                failpoints.hit("reconcile.found")
                self.delivered += len(batch)
                yield batch
            elif batch is not None:
                await self._mark_consumed()

    async def acknowledge(self, batch: Delivered, left: Delivered = ()) -> None:
        await self._mark_consumed(left)

    async def is_idle(self) -> bool:
        return await self._tail.has_nothing_due()

    async def _mark_consumed(self, left: Delivered = ()) -> None:
        failpoints.hit("reconcile.before_advance")
        await self._tail.mark_consumed(left)
        failpoints.hit("reconcile.after_advance")

    async def _wait_until_old(self, after: Cursor) -> None:
        """Return once some event above `after` is old enough. Then `_bound` is the cursor up to which
        events are old enough."""
        while self._bound <= after:
            left_s = await self._tail.advance()
            await self._sample_head()
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

    async def _sample_head(self) -> None:
        """Note where the log ends now and when that was first seen, if it has grown."""
        head = await self._tail.check_head()
        known = self._heads[-1][1] if self._heads else max(self._bound, self._tail.cursor)
        if head > known:
            self._heads.append((time.monotonic(), head))
