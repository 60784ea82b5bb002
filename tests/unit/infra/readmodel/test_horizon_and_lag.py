"""Which transactions hold the log back, and how far consumers are behind: the figures are true, and
cheap enough to be read often."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from infra.readmodel.platform import COUNTED, PlatformState
from infra.spine.bus.tail_wait import TailWait
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.events import RunWarned
from schemas.ids import ConsumerName, StreamName
from tests.kit.postgres import execute, fresh_database, open_database

pytestmark = pytest.mark.postgres

STREAM = StreamName("run-r")
NEAR, FAR = ConsumerName("near"), ConsumerName("far")

FILL = """
insert into events (id, stream, version, type, schema_version, data, run_id, correlation)
select gen_random_uuid(), 'run-r', n, 'rl.run.warned', 1, '{{}}', 'r', gen_random_uuid()
from generate_series(1, {events}) n
"""


@asynccontextmanager
async def open_transaction(url: str, sql: str, *, isolation: str) -> AsyncIterator[Any]:
    """A transaction that has run this statement and idles."""
    connection = await asyncpg.connect(url)
    try:
        transaction = connection.transaction(isolation=isolation)
        await transaction.start()
        await connection.execute(sql)
        yield connection
        await transaction.rollback()
    finally:
        await connection.close()


async def appended(log: PostgresLog) -> Cursor:
    (recorded,) = await log.append([RunWarned(run="r", step=1, message="x")], cause=uuid4())
    return recorded.cursor


async def seen(log: PostgresLog, cursor: Cursor) -> bool:
    found, _ = await log.tail(Cursor(), limit=100)
    return cursor in {recorded.cursor for recorded in found}


async def test_a_reader_holds_nothing_back_and_raises_no_alarm(database: Database) -> None:
    async with Notifier(database) as notifier:
        log, reading = PostgresLog(database, notifier), "select count(*) from events"
        async with open_transaction(database.url, reading, isolation="repeatable_read"):
            cursor = await appended(log)
            async with asyncio.timeout(60):
                while not await seen(log, cursor):
                    await asyncio.sleep(0.01)
                while await PlatformState(database).horizon_age_s() > 0:
                    await asyncio.sleep(0.01)


async def test_a_writer_holds_back_later_commits_and_is_reported(
    database: Database,
) -> None:
    async with Notifier(database) as notifier:
        log, writing = PostgresLog(database, notifier), "insert into streams values ('s', 1)"
        async with open_transaction(database.url, writing, isolation="read_committed"):
            cursor = await appended(log)
            assert not await seen(log, cursor)
            assert await log.has_events_after(Cursor())
            assert await PlatformState(database).horizon_age_s() > 0
        async with asyncio.timeout(60):
            while not await seen(log, cursor):
                await asyncio.sleep(0.01)


async def test_lag_is_exact_when_small_and_by_positions_when_large(database: Database) -> None:
    events = 3 * COUNTED
    await execute(
        database.url,
        FILL.format(events=events),
    )
    async with Notifier(database) as notifier:
        log, platform = PostgresLog(database, notifier), PlatformState(database)
        held = (await log.load({STREAM: 0}))[STREAM]
        await log.advance([FAR], held[0].cursor)
        await log.advance([NEAR], held[-8].cursor)
        assert await platform.lag() == {"far": events - 1, "near": 7}
        await log.advance([NEAR], held[-1].cursor)
        assert (await platform.lag())["near"] == 0
        await execute(
            database.url,
            "insert into relay (name, cluster, ends, xid, position)"
            f" values ('kafka', 'c', '{{}}', '{held[1].cursor.xid}', {held[1].cursor.position})",
        )
        assert (await platform.bus("kafka"))["relay_behind"] == events - 2


async def test_a_prepared_transaction_holds_the_log_back_until_somebody_ends_it(
    preparing: str,
) -> None:
    """A prepared transaction belongs to no session: the session that prepared it is gone, no time
    limit ends it, and its event is older than the events appended in the meantime."""
    await execute(preparing, f"begin;{FILL.format(events=1)};prepare transaction 'left'")
    async with open_database(preparing) as database, Notifier(database) as notifier:
        log, platform = PostgresLog(database, notifier), PlatformState(database)
        cursor = await appended(log)
        assert await log.tail(Cursor(), limit=100) == ([], Cursor())
        assert await log.has_events_after(Cursor())
        assert await platform.horizon_age_s() > 0
        await execute(preparing, "commit prepared 'left'")
        async with asyncio.timeout(60):
            while not await seen(log, cursor):
                await asyncio.sleep(0.01)
        events, after = await log.tail(Cursor(), limit=100)
        assert [event.cursor for event in events][1:] == [cursor] == [after]
        async with asyncio.timeout(60):
            while await platform.horizon_age_s() > 0:
                await asyncio.sleep(0.01)


@pytest.fixture
def elsewhere(preparing: str) -> Iterator[str]:
    """Another database of that server."""
    with fresh_database(preparing) as url:
        yield url


async def test_another_database_of_the_server_holds_nothing_back(
    preparing: str, elsewhere: str
) -> None:
    """Neither an open transaction that writes there nor a prepared one, both older than the event. By
    the server's horizon alone, the twin, the event stays hidden."""
    async with open_database(preparing) as database, Notifier(database) as notifier:
        log, platform = PostgresLog(database, notifier), PlatformState(database)
        wait = TailWait(log, notifier.subscribe())
        await execute(elsewhere, f"begin;{FILL.format(events=1)};prepare transaction 'there'")
        writing = "insert into streams values ('s', 1)"
        async with open_transaction(elsewhere, writing, isolation="read_committed"):
            cursor = await appended(log)
            async with asyncio.timeout(60):
                while not await seen(log, cursor):
                    await wait.wait(Cursor())
            assert await platform.horizon_age_s() == 0, "nothing holds this log back"
            twin = PostgresLog(database, notifier)
            assert not await seen(twin, cursor), "the twin"
            # A bound stays one, whatever the next reader reads by: or it would jump over the event.
            assert await twin.visible_head() == await log.visible_head() == cursor
            found, _ = await twin.tail(Cursor(), limit=100, upto=cursor)
            assert [recorded.cursor for recorded in found] == [cursor]
        await execute(elsewhere, "rollback prepared 'there'")


async def test_a_long_log_is_not_walked_for_its_lag(database: Database) -> None:
    await execute(
        database.url,
        FILL.format(events=20 * COUNTED),
    )
    await execute(database.url, "insert into watermarks values ('far', '0', 0)")
    read = (
        "select (select sum(pg_stat_get_xact_tuples_returned(indexrelid)) from pg_index"
        " where indrelid = 'events'::regclass) + pg_stat_get_xact_tuples_returned('events'::regclass)"
    )
    async with database.durable.acquire() as connection, connection.transaction():
        platform = PlatformState(database)
        platform._pool = connection
        before = await connection.fetchval(read)
        assert (await platform.lag())["far"] == 20 * COUNTED
        assert await connection.fetchval(read) - before < 2 * COUNTED
