"""A tail of the log sees every committed event once and each stream in its order, under writers
whose transactions overlap, wait and roll back; a tail by position alone loses events under the same
writers. A tail by the horizon of our own writers also sees them all, and a transaction of another
database cannot stop it.

HEADRACE_TAIL_S says for how long they write.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import asyncpg
import pytest

from infra.spine.ports.event_log import Cursor
from infra.spine.postgres import event_log
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.horizon import Horizon
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import ROOT, Queries
from tests.kit.postgres import database_of, execute

pytestmark = pytest.mark.postgres

SECONDS = float(os.environ.get("HEADRACE_TAIL_S", "5"))
WRITERS = 16
PAGE = 500

INSERT = (
    "insert into events (id, stream, version, type, schema_version, data, run_id, correlation)"
    " values ($1, $2, $3, 'rl.run.warned', 1, $4, 'r', $1) returning position"
)
PAYLOAD = '{"run": "r", "step": 1, "message": "x"}'


@pytest.fixture(scope="module", params=["embedded", "server"])
def postgres_url(request: pytest.FixtureRequest) -> str:
    """On both servers, because they are different versions."""
    name = "server_url" if request.param == "server" else "embedded_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def log(database: Database) -> AsyncIterator[PostgresLog]:
    async with Notifier(database) as notifier:
        yield PostgresLog(database, notifier)


@dataclass
class Writer:
    """Transactions of one to three events, with random pauses between insert and end; a fifth of
    them is rolled back."""

    number: int
    kept: list[int] = field(default_factory=list)
    rolled_back: int = 0

    async def write(self, url: str, until: float) -> None:
        draw = random.Random(self.number)
        connection = await asyncpg.connect(url)
        version = 0
        while time.monotonic() < until:
            transaction = connection.transaction()
            await transaction.start()
            positions = []
            for _ in range(draw.randint(1, 3)):
                version += 1
                stream = f"run-{self.number}"
                positions.append(
                    await connection.fetchval(INSERT, uuid4(), stream, version, PAYLOAD)
                )
                await asyncio.sleep(draw.choice((0.0, 0.001, 0.01, 0.03)))
            if draw.random() < 0.2:
                await transaction.rollback()
                self.rolled_back += 1
            else:
                await transaction.commit()
                self.kept += positions
        await connection.close()


class AlwaysOwn(Horizon):
    """A horizon that always counts our own writers only, as if an event had just been hidden for
    too long."""

    @property
    def below(self) -> str:
        return "below_own_horizon"


@asynccontextmanager
async def another_database(url: str) -> AsyncIterator[str]:
    """The URL of another database on the same server, with a table `t`."""
    name = f"t{uuid4().hex[:12]}"
    await execute(url, f"create database {name}")
    other = database_of(url, name)
    try:
        await execute(other, "create table t (n integer)")
        yield other
    finally:
        await execute(url, f"drop database {name} with (force)")


@asynccontextmanager
async def writing(url: str) -> AsyncIterator[None]:
    """A transaction that writes to `t` of this database stays open inside the block."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("begin; insert into t values (1)")
        yield
        await connection.execute("rollback")
    finally:
        await connection.close()


@dataclass
class Tail:
    """A reader that follows the log by horizon, as every reader of Headrace does."""

    seen: Counter[int] = field(default_factory=Counter)
    versions: dict[str, int] = field(default_factory=dict)
    disorder: list[str] = field(default_factory=list)

    async def follow(self, log: PostgresLog, stop: asyncio.Event) -> None:
        cursor = Cursor()
        while True:
            last = stop.is_set()
            page, cursor = await log.tail(cursor, limit=PAGE)
            for recorded in page:
                self.seen[recorded.cursor.position] += 1
                if recorded.version <= self.versions.get(recorded.stream, 0):
                    self.disorder.append(f"{recorded.stream}/{recorded.version}")
                self.versions[recorded.stream] = recorded.version
            if last and not page:
                return
            await asyncio.sleep(0.001)


async def follow_naively(database: Database, stop: asyncio.Event) -> set[int]:
    """The twin: it follows by position alone, without the horizon."""
    seen: set[int] = set()
    position = 0
    while True:
        last = stop.is_set()
        rows = await database.durable.fetch(
            "select position from events where position > $1 order by position", position
        )
        seen |= {row["position"] for row in rows}
        position = rows[-1]["position"] if rows else position
        if last and not rows:
            return seen
        await asyncio.sleep(0.001)


async def foreign_writers(url: str, until: float) -> None:
    """Short transactions of another database, so that sessions come and go all the time."""
    draw = random.Random("foreign")
    while time.monotonic() < until:
        connection = await asyncpg.connect(url)
        for _ in range(draw.randint(1, 5)):
            async with connection.transaction():
                await connection.execute("insert into t values (1)")
                await asyncio.sleep(draw.choice((0.0, 0.001, 0.02)))
        await connection.close()


async def test_the_tail_by_our_own_writers_misses_nothing_beside_another_database(
    log: PostgresLog, database: Database
) -> None:
    """All events are seen while a transaction of the other database, older than every event, is
    open."""
    log._horizon = AlwaysOwn()
    stop, tail = asyncio.Event(), Tail()
    async with another_database(database.url) as other, writing(other):
        good = asyncio.ensure_future(tail.follow(log, stop))
        writers = [Writer(number) for number in range(WRITERS)]
        until = time.monotonic() + SECONDS / 2
        await asyncio.gather(
            *(writer.write(database.url, until) for writer in writers),
            *(foreign_writers(other, until) for _ in range(4)),
        )
        stop.set()
        await good
        kept = {position for writer in writers for position in writer.kept}
        assert tail.seen == Counter(kept)
        assert not tail.disorder, tail.disorder[:5]
        log._horizon = Horizon()
        assert await log.tail(Cursor(), limit=PAGE) == ([], Cursor()), "by the server's: nothing"


HELD_UP = """
create function held_up_horizon(pg_snapshot) returns xid8 language plpgsql stable as $$
begin
    perform pg_advisory_xact_lock_shared(1);
    return {};
end $$
"""
RIGHT = "own_horizon($1)"
NAIVE = """(select coalesce(
    (select backend_xid::text::xid8 from pg_stat_activity
     where backend_xid is not null and datname = current_database()
     order by backend_xid::text::bigint limit 1),
    pg_snapshot_xmax($1)))"""
"""The oldest of our writers, whatever the snapshot says: one that ends after the snapshot was taken and
before the sessions are looked at is in neither."""


HELD_UP_QUERIES = Queries(
    "event_log",
    (ROOT / "infra/spine/postgres/sql/event_log.sql")
    .read_text()
    .replace("own_horizon(", "held_up_horizon("),
)
"""Between its snapshot and its look at the sessions a reader waits for a lock."""


@pytest.mark.parametrize("horizon", [RIGHT, pytest.param(NAIVE, id="twin")])
async def test_a_writer_that_ends_while_sessions_are_looked_at_is_not_passed(
    log: PostgresLog, database: Database, horizon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event is older than one that is already committed."""
    await execute(database.url, HELD_UP.format(horizon))
    monkeypatch.setattr(event_log, "SQL", HELD_UP_QUERIES)
    log._horizon = AlwaysOwn()
    older = await asyncpg.connect(database.url)
    await older.execute("begin")
    hidden = await older.fetchval(INSERT, uuid4(), "run-older", 1, PAYLOAD)
    newer = await asyncpg.connect(database.url)
    await newer.fetchval(INSERT, uuid4(), "run-newer", 1, PAYLOAD)
    await newer.execute("select pg_advisory_lock(1)")
    tailing = asyncio.ensure_future(log.tail(Cursor(), limit=PAGE))
    while not await newer.fetchval(
        "select count(*) from pg_stat_activity where wait_event = 'advisory' and"
        " datname = current_database()"
    ):
        await asyncio.sleep(0.01)
    await older.execute("commit")
    await newer.execute("select pg_advisory_unlock(1)")
    first, cursor = await tailing
    then, _ = await log.tail(cursor, limit=PAGE)
    found = hidden in {recorded.cursor.position for recorded in (*first, *then)}
    assert found == (horizon is RIGHT), "the twin passes it and never sees it"
    await older.close()
    await newer.close()


async def test_the_tail_by_horizon_misses_nothing_where_the_naive_tail_does(
    log: PostgresLog, database: Database
) -> None:
    stop, tail = asyncio.Event(), Tail()
    good = asyncio.ensure_future(tail.follow(log, stop))
    naive = asyncio.ensure_future(follow_naively(database, stop))
    writers = [Writer(number) for number in range(WRITERS)]
    until = time.monotonic() + SECONDS
    await asyncio.gather(*(writer.write(database.url, until) for writer in writers))
    stop.set()
    await good
    kept = {position for writer in writers for position in writer.kept}
    assert all(writer.rolled_back for writer in writers)
    assert tail.seen == Counter(kept)
    assert not tail.disorder, tail.disorder[:5]
    assert await naive < kept, "the naive tail was expected to lose events under these writers"
