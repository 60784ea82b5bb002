"""Poison mixed 1:100 into load, on a real database: every neighbour is decided on exactly once, every
poisoned message is a dead letter, and driven again, once the cause is gone, it is decided on too."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from infra.spine.ports.event_log import Cursor, Recorded
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from infra.spine.runtime.hosting import Hosting
from schemas.effects import Lane
from schemas.events import CheckpointFailed, MessageDeadLettered, MessageRedriven, RunWarned
from schemas.ids import EventId, StreamName, WorkerId
from tests.kit.commits import commit_of
from tests.kit.hosting import Script, consumer
from tests.kit.runtimes import runtime_on

pytestmark = pytest.mark.postgres

RUNS = 20
EACH = 50
RAISING = 10
"""Of the thousand messages every hundredth makes the decider raise, and as many do not decode."""

WORKER = WorkerId("w")


@asynccontextmanager
async def working(
    database: Database, log: PostgresLog, notifier: Notifier, script: Script, home: Path
) -> AsyncIterator[None]:
    await PostgresEffects(database).register(WORKER, host="h", pid=1, lease_s=600)
    hosting = Hosting(WORKER, (consumer(script),), (Lane.CONTROL,))
    runtime = runtime_on(database, notifier, hosting, home=home, log=log)
    task = asyncio.ensure_future(runtime.run())
    yield
    runtime.stop()
    await task


async def load(log: PostgresLog) -> None:
    """A thousand messages of twenty runs, appended by several writers at once."""

    async def one_run(run: str) -> None:
        for step in range(1, EACH + 1):
            await log.commit(commit_of(RunWarned(run=run, step=step, message="look"), step))

    await asyncio.gather(*(one_run(f"r{n}") for n in range(RUNS)))


async def spoil(database: Database, count: int) -> None:
    """Records that do not decode, as a newer or a broken writer would leave them."""
    for n in range(count):
        await database.durable.execute(
            "insert into events (id, stream, version, type, schema_version, data, run_id,"
            " correlation) values ($1, $2, 1, 'rl.run.warned', 1, $3, $2, $1)",
            uuid4(),
            f"spoilt-{n}",
            '{"run": 7, "step": "none"}',
        )


async def told(log: PostgresLog) -> list[Recorded]:
    found: list[Recorded] = []
    cursor = Cursor()
    while True:
        page, after = await log.tail(cursor, limit=1000)
        if after == cursor:
            return found
        found += page
        cursor = after


def counted(events: list[Recorded]) -> Counter[tuple[str, int]]:
    """How often each message was decided on."""
    failed = [r.event for r in events if r.type == CheckpointFailed.type]
    return Counter((e.run, e.step) for e in failed if isinstance(e, CheckpointFailed))


def letters(events: list[Recorded]) -> list[tuple[EventId, MessageDeadLettered]]:
    dead = [(r.id, r.event) for r in events if r.type == MessageDeadLettered.type]
    return [(i, e) for i, e in dead if isinstance(e, MessageDeadLettered)]


async def test_neighbours_are_unharmed_and_what_was_put_aside_is_not_lost(
    database: Database, tmp_path: Path
) -> None:
    draw = random.Random(11)
    everything = {(f"r{n}", step) for n in range(RUNS) for step in range(1, EACH + 1)}
    poison = set(draw.sample(sorted(everything), RAISING))
    script = Script()

    def decide(event: RunWarned) -> None:
        if (event.run, event.step) in poison:
            raise ValueError("poison")

    script.on_event = decide
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        await spoil(database, RAISING // 2)
        async with working(database, log, notifier, script, tmp_path):
            await load(log)
            await spoil(database, RAISING - RAISING // 2)
            async with asyncio.timeout(180):
                while len(letters(await told(log))) < 2 * RAISING or len(
                    counted(await told(log))
                ) < len(everything - poison):
                    await asyncio.sleep(0.1)
            events = await told(log)
            assert counted(events) == Counter(dict.fromkeys(everything - poison, 1))
            dead = letters(events)
            assert len(dead) == 2 * RAISING
            assert {e.message_type for _, e in dead} == {"rl.run.warned"}
            assert Counter(e.pauses for _, e in dead) == {True: RAISING, False: RAISING}
            held = {run for run, _ in poison}
            gates = await PostgresEffects(database).gates([f"r{n}" for n in range(RUNS)])
            assert {run for run, state in gates.items() if state == "paused"} == held
            script.on_event = lambda event: None
            for letter, event in dead:
                if event.pauses:
                    await drive(log, letter, event)
            async with asyncio.timeout(180):
                while len(counted(await told(log))) < len(everything):
                    await asyncio.sleep(0.1)
        assert counted(await told(log)) == Counter(dict.fromkeys(everything, 1))
        gates = await PostgresEffects(database).gates(sorted(held))
        assert set(gates.values()) == {"open"}


async def drive(log: PostgresLog, letter: EventId, event: MessageDeadLettered) -> None:
    again = MessageRedriven(
        consumer=event.consumer,
        letter=letter,
        message_id=event.message_id,
        message_stream=StreamName(event.message_stream),
        message_version=event.message_version,
        about=event.about,
        paused=event.pauses,
    )
    await log.append([again], cause=letter)
