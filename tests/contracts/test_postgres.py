"""Postgres keeps every contract, the embedded one and a server that is older; and its tail misses
nothing where a naive tail does."""

import asyncio
import random
from collections.abc import AsyncIterator
from uuid import uuid4

import asyncpg
import pytest

from infra.bus import EmbeddedBus
from infra.database import Database
from infra.effects import PostgresEffects
from infra.log import PostgresLog
from infra.notify import Notifier
from infra.ports import Cursor
from schemas.ids import WorkerId
from tests.contracts.bus_suite import BoundBus, BusSuite
from tests.contracts.effects_suite import Bound, EffectsSuite
from tests.contracts.event_log_suite import EventLogSuite

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module", params=["embedded", "server"])
def postgres_url(request: pytest.FixtureRequest) -> str:
    """Every test here runs on both."""
    name = "server_url" if request.param == "server" else "embedded_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def notifier(database: Database) -> AsyncIterator[Notifier]:
    async with Notifier(database) as found:
        yield found


@pytest.fixture
def log(database: Database, notifier: Notifier) -> PostgresLog:
    return PostgresLog(database, notifier)


class TestLog(EventLogSuite):
    pass


class TestEffects(EffectsSuite):
    @pytest.fixture
    def bound(self, database: Database, log: PostgresLog) -> Bound:
        effects = PostgresEffects(database)

        async def expired(seconds: float, worker: WorkerId) -> None:
            await database.durable.execute(
                "update workers set expires_at = clock_timestamp() where id = $1", worker
            )

        return Bound(log, effects, expired)


class TestBus(BusSuite):
    @pytest.fixture
    def bound(self, log: PostgresLog, notifier: Notifier) -> BoundBus:
        return BoundBus(log, lambda: EmbeddedBus(log, notifier))


WRITERS = 8
WRITES = 25


async def _write(url: str, seed: int) -> int:
    """Jittered transactions, some rolled back, each inserting before it waits; returns how many stay."""
    draw = random.Random(seed)  # noqa: S311
    connection = await asyncpg.connect(url)
    kept = 0
    for n in range(WRITES):
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "insert into events (id, stream, version, type, schema_version, data, run_id, correlation)"
            " values ($1, $2, $3, 'rl.run.warned', 1, $4, 'r', $1)",
            uuid4(),
            f"run-{seed}",
            n + 1,
            '{"run": "r", "step": 1, "message": "x"}',
        )
        await asyncio.sleep(draw.uniform(0, 0.01))
        if draw.random() < 0.2:
            await transaction.rollback()
        else:
            await transaction.commit()
            kept += 1
    await connection.close()
    return kept


async def _follow(log: PostgresLog, stop: asyncio.Event) -> int:
    cursor, seen = Cursor(), 0
    while True:
        last = stop.is_set()
        page, cursor = await log.tail(cursor, limit=50)
        seen += len(page)
        if last and not page:
            return seen
        await asyncio.sleep(0.001)


async def _follow_naively(database: Database, stop: asyncio.Event) -> int:
    position, seen = 0, 0
    while True:
        last = stop.is_set()
        rows = await database.durable.fetch(
            "select position from events where position > $1 order by position", position
        )
        seen += len(rows)
        position = rows[-1]["position"] if rows else position
        if last and not rows:
            return seen
        await asyncio.sleep(0.001)


async def test_the_tail_by_horizon_misses_nothing_where_the_naive_tail_does(
    log: PostgresLog, database: Database
) -> None:
    stop = asyncio.Event()
    good = asyncio.ensure_future(_follow(log, stop))
    naive = asyncio.ensure_future(_follow_naively(database, stop))
    kept = sum(await asyncio.gather(*(_write(database.url, n) for n in range(WRITERS))))
    stop.set()
    assert await good == kept
    assert await naive < kept, "the naive tail was expected to lose events under these writers"
