"""The rows that stay in the working tables after many events went through a worker, and how much a claim
and a read of the log then read. Used by B7 and, with few events, by a test.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from bench.durable_ours import CONSUMER, Headrace
from bench.durable_theirs import AT_ONCE
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.effects import Lane
from schemas.ids import WorkerId

TABLES = ("inbox", "effects", "workers", "run_gates", "watermarks")
CLAIMED, LOOKED = ("effects", "workers"), ("events", "inbox", "watermarks")
EVENTS_EACH = 3
"""Events of the log a message leads to."""

LOOK_S = 0.2
WITHIN_S = 60.0

READ = """
select sum(pg_stat_get_xact_tuples_returned(oid) + pg_stat_get_xact_tuples_fetched(oid))::bigint
from (select indexrelid as oid from pg_index where indrelid = any ($1::regclass[])
      union all select unnest($1::regclass[])::oid) as relations
"""
"""Entries of indexes and rows of tables that this transaction has read."""

BACK = "select xid, position from events order by xid desc, position desc offset 100 limit 1"

HEAD = (
    f"{'events':>10}{'events/s':>10}"
    + "".join(f"{t:>16}" for t in TABLES)
    + f"{'MB':>8}{'claim reads':>13}{'look reads':>12}"
)


@dataclass
class Grown:
    """Rows per table, `most` at any look and `left` when nothing was to do; what was read then for a
    claim that found nothing and for the last hundred events; the size of these tables on disk."""

    events: int
    per_s: float = 0.0
    most: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    megabytes: float = 0.0
    claim_reads: int = 0
    look_reads: int = 0

    def __str__(self) -> str:
        rows = "".join(f"{f'{self.most[t]:,} / {self.left[t]:,}':>16}" for t in TABLES)
        return (
            f"{self.events:>10,}{self.per_s:>10,.0f}{rows}{self.megabytes:>8.1f}"
            f"{self.claim_reads:>13,}{self.look_reads:>12,}"
        )


async def measure_growth(database: Database, events: int) -> Grown:
    """Put so many events through a worker of its own in this database, and look. Raises TimeoutError
    when the worker does not come to its end."""
    found = Grown(events)
    messages = events // EVENTS_EACH
    async with _working(database.url) as done, _looking(database, found):
        began = time.monotonic()
        await _sent(database.url, messages)
        await _finished(done, messages)
        found.per_s = EVENTS_EACH * messages / (time.monotonic() - began)
        await _passed(database)
    found.left = await _counts(database)
    size = "select sum(pg_total_relation_size(t::regclass)) from unnest($1::text[]) t"
    found.megabytes = float(await database.lazy.fetchval(size, list(TABLES))) / 2**20
    await _read(database, found)
    return found


@asynccontextmanager
async def _working(url: str) -> AsyncIterator[dict[str, float]]:
    done: dict[str, float] = {}
    task = asyncio.ensure_future(Headrace().work(url, done, lambda: None))
    try:
        yield done
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def _looking(database: Database, found: Grown) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            for table, count in (await _counts(database)).items():
                found.most[table] = max(found.most.get(table, 0), count)
            await asyncio.sleep(LOOK_S)

    task = asyncio.ensure_future(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _sent(url: str, messages: int) -> None:
    async with Headrace().client(url) as ask:
        left = iter(range(messages))

        async def send() -> None:
            for _ in left:
                await ask(uuid4().hex)

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))


async def _finished(done: dict[str, float], messages: int) -> None:
    """Until all are done, for as long as any is done within `WITHIN_S`."""
    while (before := len(done)) < messages:
        async with asyncio.timeout(WITHIN_S):
            while len(done) == before:
                await asyncio.sleep(0.02)


async def _passed(database: Database) -> None:
    """Until the watermark is at the end of the log."""
    behind = (
        "select not exists (select from watermarks where consumer = $1) or exists (select from events e,"
        " watermarks w where w.consumer = $1 and (e.xid, e.position) > (w.xid, w.position))"
    )
    async with asyncio.timeout(WITHIN_S):
        while await database.lazy.fetchval(behind, CONSUMER.name):
            await asyncio.sleep(0.05)


async def _counts(database: Database) -> dict[str, int]:
    counts = ", ".join(f"(select count(*) from {table}) as {table}" for table in TABLES)
    return dict(await database.lazy.fetchrow(f"select {counts}"))


async def _read(database: Database, found: Grown) -> None:
    async with Notifier(database) as notifier:
        log, effects = PostgresLog(database, notifier), PostgresEffects(database)
        worker = WorkerId("looks")
        await effects.register(worker, host="h", pid=1, lease_s=60)
        async with database.durable.acquire() as connection, connection.transaction():
            log._pool = effects._pool = connection
            start = await connection.fetchrow(BACK)
            with_claim = await connection.fetchval(READ, CLAIMED)
            await effects.claim(worker, room=dict.fromkeys(Lane, 100), consumers=[CONSUMER.name])
            found.claim_reads = await connection.fetchval(READ, CLAIMED) - with_claim
            with_look = await connection.fetchval(READ, LOOKED)
            page, _ = await log.tail(Cursor(start["xid"], start["position"]), limit=100)
            await log.unconsumed([(CONSUMER.name, recorded) for recorded in page])
            found.look_reads = await connection.fetchval(READ, LOOKED) - with_look
