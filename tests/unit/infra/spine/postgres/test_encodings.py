"""Databases that cannot hold every text are refused by migrate and at start. If one is used all the
same, or has constraints of its own, a value that it rejects ends no process."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from infra.spine.postgres import migrate as migrating
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.migrate import check, migrate
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from infra.spine.runtime.consumer import Decision
from infra.spine.runtime.hosting import Hosting
from schemas.effects import Lane
from schemas.errors import InvalidConfig
from schemas.events import CheckpointFailed, MessageDeadLettered, RunWarned
from schemas.ids import StreamName, WorkerId
from tests.kit.hosting import Script, consumer
from tests.kit.postgres import database_of, execute
from tests.kit.runtimes import runtime_on

pytestmark = pytest.mark.postgres

NARROW = "渠"
"""A character that LATIN1 does not have."""


@pytest.fixture
def latin1_url(postgres_url: str) -> Iterator[str]:
    name = f"t{uuid4().hex[:12]}"
    make = f"create database {name} template template0 encoding 'LATIN1' locale 'C'"
    asyncio.run(execute(postgres_url, make))
    yield database_of(postgres_url, name)
    asyncio.run(execute(postgres_url, f"drop database {name} with (force)"))


async def test_an_encoding_that_cannot_hold_every_text_is_refused_before_anything_is_made(
    latin1_url: str,
) -> None:
    with pytest.raises(InvalidConfig, match=r"LATIN1.*create database .* encoding 'UTF8'"):
        await migrate(latin1_url)
    connection = await asyncpg.connect(latin1_url)
    assert await connection.fetchval("select to_regclass('migrations')") is None
    await connection.close()


async def test_a_process_on_such_a_database_is_refused_too(
    latin1_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(migrating, "_refuse_encoding", lambda row: None)
        await migrate(latin1_url)
    async with connect(latin1_url, size=1) as database:
        with pytest.raises(InvalidConfig, match="LATIN1"):
            await check(database)


async def neighbours_go_on(url: str, home: Path, message: str) -> MessageDeadLettered:
    """The dead letter of the one message in a batch whose decision (`message`) is rejected, once
    the messages around it are decided on."""
    made = consumer(Script())

    def handle(state: int, warned: RunWarned, meta: Any) -> Decision:
        text = message if warned.run == "bad" else "seen"
        seen = CheckpointFailed(run=warned.run, step=warned.step, message=text)
        return Decision(events=(seen,))

    hosting = Hosting(WorkerId("w"), (replace(made, handle=handle),), (Lane.CONTROL,))
    async with connect(url, size=2) as database, Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        for run in ("good", "bad", "fine"):
            await log.append([RunWarned(run=run, step=1, message="look")], cause=uuid4())
        runtime = runtime_on(database, notifier, hosting, home=home)
        task = asyncio.ensure_future(runtime.run())
        async with asyncio.timeout(60):
            while not (letters := await _letters(log)) or not await _all_seen(log):
                assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
        runtime.stop()
        await task
        gate = "select state = 'open' and holds > 0 from run_gates where run_id = 'bad'"
        assert await database.durable.fetchval(gate), "its run is held"
    (letter,) = letters
    return letter


async def _letters(log: PostgresLog) -> list[MessageDeadLettered]:
    stream = StreamName("dead-letter-bench")
    events = [r.event for r in (await log.load({stream: 0}))[stream]]
    return [event for event in events if isinstance(event, MessageDeadLettered)]


async def _all_seen(log: PostgresLog) -> bool:
    loaded = await log.load({StreamName("checkpoint-good"): 0, StreamName("checkpoint-fine"): 0})
    return all(len(events) == 1 for events in loaded.values())


async def test_a_character_that_the_database_lacks_ends_no_process(
    latin1_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was made before such databases were refused."""
    monkeypatch.setattr(migrating, "_refuse_encoding", lambda row: None)
    await migrate(latin1_url)
    letter = await neighbours_go_on(latin1_url, tmp_path, NARROW)
    assert "22P05" in letter.cause


@pytest.mark.parametrize(
    ("constraint", "message", "state"),
    [
        ("data ->> 'message' <> 'poison'", "poison", "23514"),
        ("coalesce(data ->> 'message', '') <> 'x'", "a\0b", "22P05"),
        ("coalesce(length(data ->> 'message'), 0) < 1000", "x" * 1000, "23514"),
    ],
)
async def test_a_broken_constraint_ends_no_process(
    database_url: str, tmp_path: Path, constraint: str, message: str, state: str
) -> None:
    await execute(database_url, f"alter table events add constraint ours check ({constraint})")
    letter = await neighbours_go_on(database_url, tmp_path, message)
    assert state in letter.cause
