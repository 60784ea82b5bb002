"""Who tails the log sees every committed event once and each stream in its order, under writers whose
transactions overlap, wait and roll back; a tail by position alone loses events under the same writers.

HEADRACE_TAIL_S says for how long they write.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from uuid import uuid4

import asyncpg
import pytest

from infra.database import Database
from infra.log import PostgresLog
from infra.notify import Notifier
from infra.ports import Cursor

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
    """On both: they are different versions."""
    name = "server_url" if request.param == "server" else "embedded_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def log(database: Database) -> AsyncIterator[PostgresLog]:
    async with Notifier(database) as notifier:
        yield PostgresLog(database, notifier)


@dataclass
class Writer:
    """Transactions of one to three events, jittered between insert and end; a fifth is rolled back."""

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


@dataclass
class Tail:
    """Who follows by horizon, as every reader of Headrace does."""

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
    """The twin: by position alone, without the horizon."""
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
