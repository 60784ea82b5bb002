"""`--drain` ends when no work is left that it may do. It ignores runs that are paused, held or
closed, and the work of other consumers; it waits for effects that are retried later."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from infra.spine.memory.event_log import MemoryEffects, MemoryLog
from infra.spine.ports.effects import Effects
from infra.spine.ports.event_log import Commit, EventLog
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from infra.spine.runtime import attempt, performer
from infra.spine.runtime.runtime import Runtime
from schemas.events import RunPaused, RunStopped, RunWarned
from schemas.ids import ConsumerName, WorkerId
from tests.contracts.effects_suite import Bound as Both
from tests.contracts.effects_suite import append, effect, letter
from tests.kit.hosting import WORKER, Bench, Script, consumer
from tests.kit.on_postgres import WORKER as ON_POSTGRES
from tests.kit.on_postgres import runtime_on

HOSTED = "sync"


class World:
    """A log, its effects, and a runtime that has not started yet."""

    def __init__(self, log: EventLog, effects: Effects, started: Runtime, script: Script) -> None:
        self.log = log
        self.effects = effects
        self.runtime = started
        self.script = script

    async def resting(self) -> None:
        """A run of each kind whose effects nobody may claim now, and a run that has no effects
        left."""
        runs = [uuid4().hex for _ in range(3)]
        await self.log.commit(Commit(effects=tuple(effect(run) for run in runs)))
        both = Both(self.log, self.effects, _never)
        await append(both, RunPaused(run=runs[0], step=1))
        await append(both, letter(runs[1]))
        await append(both, RunStopped(run=runs[2], step=1))


async def _never(seconds: float, worker: WorkerId) -> None:
    raise NotImplementedError


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest) -> str | None:
    """The URL of the database; None means in memory."""
    return None if request.param == "memory" else str(request.getfixturevalue("database_url"))


@pytest.fixture
async def world(
    url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    script = Script(asks=True)
    hosted = consumer(script, name=HOSTED)
    if url is None:
        bench = Bench(tmp_path, [hosted])
        bench.world.workers[WORKER] = bench.world.now.replace(year=2100)
        yield World(MemoryLog(bench.world), MemoryEffects(bench.world), bench.runtime(), script)
        return
    async with connect(url) as database, Notifier(database) as notifier:
        effects = PostgresEffects(database)
        await effects.register(ON_POSTGRES, host="h", pid=1, lease_s=600)
        log, started = runtime_on(hosted, database, notifier, tmp_path)
        yield World(log, effects, started, script)


async def test_it_does_what_it_may_and_ends_beside_what_rests(world: World) -> None:
    await world.resting()
    await world.log.append([RunWarned(run="r", step=1, message="look")], cause=uuid4())
    async with asyncio.timeout(60):
        await world.runtime.run(drain=True)
    assert world.script.performed == ["r"]


async def test_twin_with_every_row_counted_it_never_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def any_row(self: object, **_: Any) -> bool:
        return True  # `resting` leaves rows behind

    monkeypatch.setattr(type(world.effects), "has_unfinished", any_row)
    await world.resting()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await world.runtime.run(drain=True)


async def test_others_work_is_not_waited_for(world: World) -> None:
    stranger = replace(effect(uuid4().hex), consumer=ConsumerName("grade"))
    await world.log.commit(Commit(effects=(stranger,)))
    async with asyncio.timeout(60):
        await world.runtime.run(drain=True)
    assert world.script.performed == []


async def test_a_drain_waits_for_an_event_that_becomes_an_effect_while_it_looks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, looks = type(world.effects).has_unfinished, 0

    async def late(self: Effects, **arguments: Any) -> bool:
        """The first look saw no effect, and its answer arrives when an event has become one."""
        nonlocal looks
        looks += 1
        if looks == 1:
            message = RunWarned(run="r", step=1, message="look")
            await world.log.append([message], cause=uuid4())
            while not (runs() and await world.runtime._bus.is_idle()):
                await asyncio.sleep(0.01)
        return looks > 1 and await original(self, **arguments)

    monkeypatch.setattr(type(world.effects), "has_unfinished", late)
    runs = _retried(monkeypatch)
    async with asyncio.timeout(60):
        await world.runtime.run(drain=True)
    assert runs() == 2


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_drain_waits_for_an_event_that_an_older_transaction_hides(
    world: World, url: str
) -> None:
    """Any writer may be about to commit an event before it, so nobody reads it yet."""
    connection = await asyncpg.connect(url)
    try:
        older = connection.transaction()
        await older.start()
        await connection.execute("select pg_current_xact_id()")
        await world.log.append([RunWarned(run="r", step=1, message="look")], cause=uuid4())
        draining = asyncio.ensure_future(world.runtime.run(drain=True))
        done, _ = await asyncio.wait({draining}, timeout=1)
        await older.rollback()
        async with asyncio.timeout(60):
            await draining
    finally:
        await connection.close()
    assert (world.script.performed, done) == (["r"], set())


async def test_a_drain_waits_until_it_reads_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is away for a moment, just before the process subscribes to its events."""
    await world.log.append([RunWarned(run="r", step=1, message="look")], cause=uuid4())
    original = type(world.log).clock_time

    async def late(self: EventLog) -> datetime:
        await asyncio.sleep(0.5)
        return await original(self)

    monkeypatch.setattr(type(world.log), "clock_time", late)
    async with asyncio.timeout(60):
        await world.runtime.run(drain=True)
    assert world.script.performed == ["r"]


async def test_a_drain_waits_for_later_retries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = _retried(monkeypatch)
    await world.log.append([RunWarned(run="r", step=1, message="look")], cause=uuid4())
    async with asyncio.timeout(60):
        await world.runtime.run(drain=True)
    assert runs() == 2


def _retried(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have the first attempt of an effect fail. Returns what counts the attempts."""
    original, times = attempt.perform_once, 0

    async def failing(*arguments: object) -> attempt.Attempt:
        nonlocal times
        times += 1
        done = await original(*arguments)  # type: ignore[arg-type]  # as given
        return done if times > 1 else attempt.Attempt(done.claimed, None, error="not now")

    monkeypatch.setattr(performer, "perform_once", failing)
    return lambda: times
