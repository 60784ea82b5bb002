"""The bus in memory. It follows the tail of the log of a `World`."""

from collections.abc import AsyncGenerator, Mapping, Sequence

from infra.memory.event_log import MemoryLog, World
from infra.ports.event_log import Cursor, Recorded
from schemas.ids import ConsumerName


class MemoryBus:
    """`infra.ports.bus.Bus` in memory. It reads the log's tail, and each commit wakes it."""

    def __init__(self, world: World, *, batch: int = 100) -> None:
        self._world = world
        self._batch = batch
        self._log = MemoryLog(world)
        self._cursor = Cursor()
        self._next = Cursor()
        self._types: list[str] = []
        self._turn = world.turns

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Sequence[tuple[ConsumerName, Recorded]], None]:
        self._types = sorted({kind for kinds in consumers.values() for kind in kinds})
        while True:
            self._world.changed.clear()
            if self._turn != self._world.turns:
                self._turn, self._cursor = self._world.turns, Cursor()
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
        return not events
