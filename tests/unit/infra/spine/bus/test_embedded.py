"""The queries that the embedded bus sends to the log: a step must not pay for queries that are not
needed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import uuid4

import pytest

from infra.spine.bus import reconciler
from infra.spine.bus.embedded import EmbeddedBus
from infra.spine.bus.reconciler import Delivered
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.event_log import Commit, NewEvent
from infra.spine.postgres.notify import Wakeup
from schemas.events import RunWarned
from schemas.ids import ConsumerName, EventId

NAMES = tuple(ConsumerName(name) for name in ("one", "two", "three"))


class Counted:
    """A log that counts the calls of its methods."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._log, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **more: Any) -> Any:
            self.calls[name] += 1
            return await method(*args, **more)

        return call

    async def has_events_after(self, after: object) -> bool:
        """In memory no event is ever hidden."""
        self.calls["has_events_after"] += 1
        return False


class Bench:
    """A log, a bus over it, and a consumer that waits for the bus's batches."""

    def __init__(self) -> None:
        self.log = Counted(MemoryLog(World()))
        self.wakeup = Wakeup()
        self.delivered: list[Delivered] = []
        self.versions = 0

    def subscribe(self) -> Wakeup:
        return self.wakeup

    async def append(self, *, consumed: bool) -> None:
        """Append an event that every consumer reads; `consumed`: consume it in the same commit, as
        a cascade does."""
        self.versions += 1
        event = RunWarned(run="r", step=self.versions, message="look")
        new = NewEvent(
            id=EventId(uuid4()),
            stream=event.stream,
            version=self.versions,
            event=event,
            causation=None,
            correlation=uuid4(),
        )
        inbox = tuple((name, new.id) for name in NAMES) if consumed else ()
        await self.log.commit(
            Commit(consumed=inbox, expected={event.stream: self.versions - 1}, events=(new,))
        )
        self.log.calls.clear()
        self.wakeup.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        bus = EmbeddedBus(cast("Any", self.log), cast("Any", self))

        async def listen() -> None:
            async for batch in bus.subscribe({name: [RunWarned.type] for name in NAMES}):
                self.delivered.append(batch)
                await bus.acknowledge(batch)

        task = asyncio.ensure_future(listen())
        try:
            await self.asked("has_events_after")
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def asked(self, what: str) -> None:
        """Wait until the bus has made this call since the last append."""
        async with asyncio.timeout(60):
            while not self.log.calls[what]:
                await asyncio.sleep(0.005)


async def test_messages_of_a_cascade_cost_three_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciler, "ADVANCE_S", 1e6)
    bench = Bench()
    async with bench.listening():
        await bench.append(consumed=True)
        await bench.asked("has_events_after")
        for _ in range(3):
            await bench.append(consumed=True)
            await bench.asked("has_events_after")
            assert bench.log.calls == {"tail": 1, "unconsumed": 1, "has_events_after": 1}
    assert bench.delivered == []


async def test_watermarks_follow_when_nothing_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "ADVANCE_S", 0.2)
    bench = Bench()
    async with bench.listening():
        await bench.append(consumed=False)
        await bench.append(consumed=False)
        await bench.asked("advance")
        async with asyncio.timeout(60):
            head = await bench.log.visible_head()
            while {await bench.log.watermark(name) for name in NAMES} != {head}:
                await asyncio.sleep(0.005)
    assert sum(len(batch) for batch in bench.delivered) == 6
