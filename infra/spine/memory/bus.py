"""The bus in memory. It follows the tail of the log of a `World`."""

from collections.abc import AsyncGenerator, Mapping, Sequence

from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.event_log import Cursor, Recorded
from schemas.ids import ConsumerName


class MemoryBus:
    """`infra.spine.ports.bus.Bus` in memory. It reads the log's tail, and each commit wakes it."""

    def __init__(self, world: World, *, batch: int = 100) -> None:
        self._world = world
        self._batch = batch
        self._log = MemoryLog(world)
        self._cursor = Cursor()
        self._next = Cursor()
        self._types: list[str] = []
        self._history_epoch = world.history_epoch

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Sequence[tuple[ConsumerName, Recorded]], None]:
        self._types = sorted({kind for kinds in consumers.values() for kind in kinds})
        while True:
            self._world.changed.clear()
            if self._history_epoch != self._world.history_epoch:
                self._history_epoch, self._cursor = self._world.history_epoch, Cursor()
            events, self._next = await self._log.tail(self._cursor, limit=self._batch)
            if self._next == self._cursor:
                await self._world.changed.wait()
                continue
            wanted = [
                (name, recorded)
                for recorded in events
                for name, kinds in consumers.items()
                if recorded.type in kinds
            ]
            batch = await self._log.unconsumed(wanted)
            if batch:
                yield batch
            else:
                await self.acknowledge(batch)

    async def acknowledge(
        self,
        batch: Sequence[tuple[ConsumerName, Recorded]],
        left: Sequence[tuple[ConsumerName, Recorded]] = (),
    ) -> None:
        self._cursor = self._next

    async def is_idle(self) -> bool:
        events, _ = await self._log.tail(self._cursor, limit=self._batch, types=self._types)
        return bool(self._types) and not events
