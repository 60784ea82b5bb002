"""The database goes back in time under its readers: a copy was restored, or a replica took over
that lacks the last transactions. Every cursor starts again from the database's answer, and no
cached state survives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from infra.spine.bus import reconciler as reconcile
from infra.spine.bus.embedded import EmbeddedBus
from infra.spine.bus.reconciler import Reconciler, Tail
from infra.spine.bus.relay import Position, Relay
from infra.spine.memory.bus import MemoryBus
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.bus import Bus
from infra.spine.ports.event_log import Commit, Cursor, Recorded
from infra.spine.postgres import errors
from infra.spine.postgres.history import HistoryChanged, as_of
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime import performer
from infra.spine.runtime.folded_states import StateCache
from schemas.events import RunWarned
from schemas.ids import ConsumerName
from tests.kit.hosting import Bench, Script, consumer

ME = ConsumerName("me")
READS = {ME: [RunWarned.type]}


class Ringing:
    """A notifier whose waiting readers are woken soon."""

    def subscribe(self) -> Wakeup:
        return Wakeup()


def embedded(world: World) -> Bus:
    return EmbeddedBus(MemoryLog(world), cast("Any", Ringing()))


def reconciler(world: World) -> Bus:
    return Reconciler(MemoryLog(world), Wakeup(), wait_s=0.0)


BUSES = [embedded, reconciler, MemoryBus]


async def warn(world: World, step: int) -> Recorded:
    event = RunWarned(run="r", step=step, message="look")
    return (await MemoryLog(world).append([event], cause=uuid4()))[0]


def back_to(world: World, num_events: int, *, noticed: bool = True) -> None:
    """The world as it was after this many events; later positions are assigned again."""
    world.events = world.events[:num_events]
    world.xid = world.events[-1].cursor.xid
    world.order = world.events[-1].cursor.position
    known = {recorded.id for recorded in world.events}
    world.inbox = {key: xid for key, xid in world.inbox.items() if key[1] in known}
    world.watermarks = {
        name: min(mark, world.events[-1].cursor) for name, mark in world.watermarks.items()
    }
    world.history_epoch += noticed
    world.changed.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "ADVANCE_S", 0.0)
    monkeypatch.setattr(reconcile, "SLOW_POLL_S", 0.01)
    monkeypatch.setattr(reconcile, "HEAD_S", 0.0)
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.02)
    monkeypatch.setattr(errors, "PAUSE_S", 0.0)


@asynccontextmanager
async def reading(world: World, bus: Bus) -> AsyncIterator[list[int]]:
    """A consumer behind a bus, which subscribes again when the bus has to start again."""
    seen: list[int] = []

    async def loop() -> None:
        async with aclosing(bus.subscribe(READS)) as batches:
            async for batch in batches:
                for name, recorded in batch:
                    seen.append(cast("RunWarned", recorded.event).step)
                    await MemoryLog(world).commit(Commit(consumed=((name, recorded.id),)))
                await bus.acknowledge(batch)

    task = asyncio.ensure_future(errors.reconnecting(loop))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(what: Callable[[], bool], *, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("make", BUSES)
async def test_a_bus_starts_again_where_the_database_says(make: Callable[[World], Bus]) -> None:
    world = World()
    async with reading(world, make(world)) as seen:
        for step in range(1, 6):
            await warn(world, step)
        await until(lambda: len(seen) == 5)
        if make is not MemoryBus:
            await until(lambda: world.watermarks.get(ME, Cursor()) >= world.events[-1].cursor)
        back_to(world, 2)
        await warn(world, 13)
        await until(lambda: len(seen) == 6)
    assert seen == [1, 2, 3, 4, 5, 13]
    if make is not MemoryBus:
        assert world.watermarks[ME] <= world.events[-1].cursor, (
            "no watermark of what did not happen"
        )


@pytest.mark.parametrize("make", [embedded, reconciler])
async def test_a_log_that_ends_below_a_cursor_is_noticed_by_itself(
    make: Callable[[World], Bus],
) -> None:
    """Nothing else announces that the log went back: it was emptied and filled again in place."""
    world = World()
    async with reading(world, make(world)) as seen:
        for step in range(1, 6):
            await warn(world, step)
        await until(lambda: len(seen) == 5)
        await until(lambda: world.watermarks.get(ME, Cursor()) >= world.events[-1].cursor)
        back_to(world, 2, noticed=False)
        await warn(world, 13)
        await until(lambda: len(seen) == 6)


@pytest.mark.parametrize("make", [embedded, reconciler])
async def test_twin_a_cursor_that_goes_on_misses_what_is_new(
    make: Callable[[World], Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tail, "check_head", lambda self: self._log.visible_head())
    world = World()
    async with reading(world, make(world)) as seen:
        for step in range(1, 6):
            await warn(world, step)
        await until(lambda: len(seen) == 5)
        back_to(world, 2, noticed=False)
        await warn(world, 13)
        with pytest.raises(TimeoutError):
            await until(lambda: len(seen) == 6, within_s=1)


async def test_no_cached_state_survives(tmp_path: Path) -> None:
    assert await _folds_after_going_back(tmp_path) == 2, "what the log holds now is folded again"


async def test_twin_a_cache_that_is_kept_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateCache, "clear", lambda self: None)
    assert await _folds_after_going_back(tmp_path) == 1


async def _folds_after_going_back(tmp_path: Path) -> int:
    """The number of events that are folded for a decision of a stream with one event before it."""
    folds = 0

    def fold(event: object) -> None:
        nonlocal folds
        folds += 1

    bench = Bench(tmp_path, [consumer(Script(on_fold=fold))])
    await bench.warn("r", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.seen("r")) == 1)
        folds = 0
        bench.world.history_epoch += 1
        await bench.warn("r", 2)
        await bench.until(lambda: len(bench.seen("r")) == 2)
    return folds


async def test_a_query_as_of_another_epoch_is_refused() -> None:
    world = World()
    await warn(world, 1)
    log = MemoryLog(world)
    calls: Sequence[Callable[[], Any]] = (
        lambda: log.tail(Cursor(), limit=1),
        lambda: log.advance([ME], world.events[-1].cursor),
        lambda: log.commit(Commit()),
    )
    with as_of(world.history_epoch):
        for call in calls:
            await call()
        world.history_epoch += 1
        for call in calls:
            with pytest.raises(HistoryChanged):
                await call()
    for call in calls:
        await call()


async def test_a_relay_notices_a_log_that_ends_below_what_it_had_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infra.spine.bus.relay.CHECK_S", 0.01)
    world = World()
    for step in range(1, 6):
        await warn(world, step)

    class Seated:
        async def position(self) -> Position:
            return Position(world.events[-1].cursor, "c", {})

    relay = Relay("", MemoryLog(world), Wakeup(), connect=cast("Any", None))
    relay._at = world.events[-1].cursor
    looking = asyncio.ensure_future(
        relay._watch_log_end(cast("Any", Seated()), world.history_epoch)
    )
    done, _ = await asyncio.wait({looking}, timeout=0.2)
    assert not done
    back_to(world, 2, noticed=False)
    with pytest.raises(HistoryChanged):
        await asyncio.wait_for(looking, 10)


async def test_a_relay_sends_nothing_from_another_epoch() -> None:
    world = World()
    relay = Relay("", MemoryLog(world), Wakeup(), connect=cast("Any", None))
    world.history_epoch = 1
    with pytest.raises(HistoryChanged):
        await relay._send(cast("Any", None), asyncio.Queue(), Cursor(9, 9), history_epoch=0)
