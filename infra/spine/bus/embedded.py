"""The buses that read the log: the embedded one, and a broker's bus with the reconciler behind it.

`EmbeddedBus` delivers events that its consumers have not consumed, as soon as they are below the
horizon. When several processes host one consumer, the inbox decides which of them consumed an event.
`Reconciled` reads a broker and the reconciler at the same time. So a run continues when one of them is
slow, and only the log has to be right.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from infra.spine.bus.reconciler import Delivered, Reconciler, Tail
from infra.spine.bus.tail_wait import TailWait
from infra.spine.ports.bus import Bus
from infra.spine.ports.event_log import EventLog
from infra.spine.postgres.notify import Notifier
from infra.task_cancellation import end
from schemas.ids import ConsumerName


class EmbeddedBus:
    """`Bus` over the log's tail: one subscription per instance, one batch at a time."""

    def __init__(self, log: EventLog, notifier: Notifier) -> None:
        self._log = log
        self._tail_wait = TailWait(log, notifier.subscribe())
        self._tail = Tail(log, {})

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Delivered, None]:
        self._tail = Tail(self._log, consumers)
        await self._tail.open()
        while True:
            self._tail_wait.begin_read()
            batch = await self._tail.next_page()
            if batch:
                yield batch
            elif batch is not None:
                await self._tail.mark_consumed()
            if batch is None or not (self._tail.last_page_was_full or self._tail_wait.has_wakeup):
                within_s = await self._tail.advance()
                await self._tail_wait.wait(self._tail.cursor, within_s=within_s)

    async def acknowledge(self, batch: Delivered, left: Delivered = ()) -> None:
        await self._tail.mark_consumed(left)

    async def is_idle(self) -> bool:
        return await self._tail.has_nothing_due()


class Reconciled:
    """`infra.spine.ports.bus.Bus`: batches of a broker's bus and of the reconciler, as they come."""

    def __init__(self, broker: Bus, reconciler: Reconciler) -> None:
        self._broker = broker
        self._reconciler = reconciler
        self._from: Bus = broker

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Delivered, None]:
        sources: tuple[Bus, ...] = (self._broker, self._reconciler)
        open_ = {source: source.subscribe(consumers) for source in sources}
        waiting = {asyncio.ensure_future(_next(open_[source])): source for source in sources}
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._from = waiting.pop(task)
                    yield task.result()
                    waiting[asyncio.ensure_future(_next(open_[self._from]))] = self._from
        finally:
            await end(waiting)
            for batches in open_.values():
                await batches.aclose()

    async def acknowledge(self, batch: Delivered, left: Delivered = ()) -> None:
        await self._from.acknowledge(batch, left)

    async def is_idle(self) -> bool:
        """The reconciler also reads past what the broker delivered, so it alone knows what is left."""
        return await self._reconciler.is_idle()


async def _next(batches: AsyncGenerator[Delivered, None]) -> Delivered:
    return await anext(batches)
