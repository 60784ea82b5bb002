"""The buses that are made of the log: the embedded one, and a broker's with the reconciler behind it.

`EmbeddedBus` hands out what its consumers have not consumed as soon as it is below the horizon: the
inbox decides who was first when several processes host one consumer. `Reconciled` asks a broker and
the reconciler at once, so that a run depends on neither being quick, and on the log alone for the truth.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from infra.bus.reconciler import Delivered, Reconciler, Tail
from infra.bus.tail_wait import Patience
from infra.ports.bus import Bus
from infra.ports.event_log import EventLog
from infra.postgres.notify import Notifier
from infra.task_cancellation import end
from schemas.ids import ConsumerName


class EmbeddedBus:
    """`infra.ports.bus.Bus` over the log's tail. One subscription per instance, one batch at a
    time."""

    def __init__(self, log: EventLog, notifier: Notifier) -> None:
        self._log = log
        self._patience = Patience(log, notifier.subscribe())
        self._tail = Tail(log, {})

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Delivered, None]:
        self._tail = Tail(self._log, consumers)
        await self._tail.open()
        while True:
            self._patience.look()
            batch = await self._tail.page()
            if batch:
                yield batch
            elif batch is not None:
                await self._tail.passed()
            if batch is None or not (self._tail.full or self._patience.called):
                within_s = await self._tail.advance()
                await self._patience.wait(self._tail.cursor, within_s=within_s)

    async def acknowledge(self, batch: Delivered) -> None:
        await self._tail.passed()

    async def idle(self) -> bool:
        return await self._tail.clear()


class Reconciled:
    """`infra.ports.bus.Bus`: whatever of a broker's bus and the reconciler has a batch first."""

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

    async def acknowledge(self, batch: Delivered) -> None:
        await self._from.acknowledge(batch)

    async def idle(self) -> bool:
        """The reconciler passes what the broker brought as well: what it sees due is all there is."""
        return await self._reconciler.idle()


async def _next(batches: AsyncGenerator[Delivered, None]) -> Delivered:
    return await anext(batches)
