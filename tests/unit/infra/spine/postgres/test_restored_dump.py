"""A dump restored into a fresh cluster continues: no event is hidden, and no consumed event is
delivered again."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest

from infra.spine.bus.embedded import EmbeddedBus
from infra.spine.ports.event_log import Commit, Cursor
from infra.spine.postgres import migrate
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, connect
from schemas.events import RunWarned
from schemas.ids import ConsumerName, EventId
from tests.kit.postgres import dump_and_restore, execute, need_programs
from tests.stack.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

READER = ConsumerName("reader")
BURN = """
do $$ begin
    create temp table burnt (n integer);
    for n in 1..20000 loop
        begin insert into burnt values (n); exception when others then null; end;
    end loop;
end $$
"""
"""Twenty thousand transaction ids: a fresh cluster is far below them."""

SKIP_ALL = """
insert into skipped_events
select 'project', id::text, run_id, type, stream, version, xid::text::bigint, position, 'poison', time
from events
"""

SKIPPED_IN_LOG = """
select count(*) from skipped_events s
join events e on e.xid = s.xid::text::xid8 and e.position = s.position
"""


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    need_programs()
    with postgres_server() as old, postgres_server() as new:
        yield old, new


async def raw_event(connection: asyncpg.Connection, version: int) -> UUID:
    """An event inserted in the connection's own transaction."""
    event = uuid4()
    await connection.execute(
        "insert into events (id, stream, version, type, schema_version, data, run_id, correlation)"
        " values ($1, $2, 1, 'rl.run.warned', 1, $3, 'r', $1)",
        event,
        f"run-{version}",
        RunWarned(run="r", step=version, message="x").model_dump_json(),
    )
    return event


async def crossed(url: str) -> tuple[UUID, UUID]:
    """Two events, of which the one with the later position has the earlier transaction."""
    early, late = await asyncpg.connect(url), await asyncpg.connect(url)
    transaction = early.transaction()
    await transaction.start()
    await early.fetchval("select pg_current_xact_id()")
    hidden = await raw_event(late, 2)
    shown = await raw_event(early, 3)
    await transaction.commit()
    await early.close()
    await late.close()
    return shown, hidden


async def consume_up_to(url: str, last: UUID) -> None:
    """Consume everything up to `last`, in the log's order, and forget the inbox below."""
    async with connect(url, size=1) as database, Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        events, _ = await log.tail(Cursor(), limit=100)
        ids = [recorded.id for recorded in events]
        passed = events[: ids.index(EventId(last)) + 1]
        await log.commit(Commit(consumed=tuple((READER, r.id) for r in passed)))
        await log.advance([READER], passed[-1].cursor)
        await database.durable.execute("delete from inbox where consumer = $1", READER)
        await database.durable.execute(
            "insert into watermarks (consumer, xid, position) values ('ahead', $1, $2)",
            *(events[-1].cursor.xid, events[-1].cursor.position),
        )


async def delivered(log: PostgresLog, notifier: Notifier, name: ConsumerName) -> list[UUID]:
    """The events that a consumer is still given."""
    found: list[UUID] = []
    bus = EmbeddedBus(log, notifier)
    reading = bus.subscribe({name: [RunWarned.type]})
    async with asyncio.timeout(60):
        async for batch in reading:
            found += [recorded.id for _, recorded in batch]
            await log.commit(Commit(consumed=tuple((who, r.id) for who, r in batch)))
            await bus.acknowledge(batch)
            if await bus.is_idle():
                break
    return found


async def filled(old: PostgresServer) -> tuple[str, UUID]:
    """A database with a short history on the old cluster, and the event that READER has not
    received."""
    name = f"t{uuid4().hex[:12]}"
    await execute(old.url, f"create database {name}")
    url = old.url_of(name)
    await migrate.migrate(url)
    await execute(url, BURN)
    connection = await asyncpg.connect(url)
    await raw_event(connection, 1)
    await connection.execute(SKIP_ALL)
    await connection.close()
    shown, hidden = await crossed(url)
    await consume_up_to(url, shown)
    return url, hidden


@pytest.fixture
async def restored(
    clusters: tuple[PostgresServer, PostgresServer], tmp_path: Path
) -> tuple[str, UUID]:
    old, new = clusters
    url, hidden = await filled(old)
    name = f"t{uuid4().hex[:12]}"
    await execute(new.url, f"create database {name}")
    await asyncio.to_thread(dump_and_restore, url, new.url_of(name), tmp_path / "dump")
    return new.url_of(name), hidden


async def new_one(log: PostgresLog) -> UUID:
    event = RunWarned(run="r", step=9, message="x")
    (recorded,) = await log.append([event], cause=uuid4())
    return recorded.id


async def test_it_goes_on_where_it_was(restored: tuple[str, UUID]) -> None:
    url, hidden = restored
    await migrate.migrate(url)
    async with connect(url) as database, Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        fresh = await new_one(log)
        assert await delivered(log, notifier, READER) == [hidden, fresh]
        assert await delivered(log, notifier, ConsumerName("ahead")) == [fresh]
        await log.advance([READER], (await log.tail(Cursor(), limit=100))[1])
        assert await _told(database) == 0, "what the inbox was told is forgotten once passed"
        assert await database.durable.fetchval(SKIPPED_IN_LOG) == 1, "it still names its event"
    await migrate.migrate(url)


async def test_twin_without_the_repair_what_is_appended_is_hidden(
    restored: tuple[str, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = restored

    async def never(_: asyncpg.Connection) -> bool:
        await execute(url, "select grant_processes()")
        return False

    monkeypatch.setattr(migrate, "repair_if_moved", never)
    await migrate.migrate(url)
    async with connect(url) as database, Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        fresh = await new_one(log)
        mark = await log.watermark(ConsumerName("ahead"))
        assert fresh not in [r.id for r in (await log.tail(mark, limit=100))[0]]


async def test_it_is_noticed_once_and_by_the_transactions_alone(
    restored: tuple[str, UUID], caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = restored
    await execute(url, "delete from cluster")
    await migrate.migrate(url)
    await migrate.migrate(url)
    assert len([r for r in caplog.records if "cursors repaired" in r.message]) == 1
    async with connect(url, size=1) as database:
        assert await database.durable.fetchval("select max(xid::text::bigint) from events") == 0
        assert await database.durable.fetchval("select count(*) from cluster") == 1


async def _told(database: Database) -> int:
    count: int = await database.durable.fetchval("select count(*) from inbox where xid = '0'")
    return count
