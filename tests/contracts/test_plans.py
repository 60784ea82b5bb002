"""Reading the log uses an index, however long the log is: no query that runs for every message
reads all events. (The inbox is kept small instead.)"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast
from uuid import uuid4

import pytest

from infra.readmodel.registry import Registry
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, Pool
from schemas.ids import ConsumerName, EventId, StreamName
from tests.kit.postgres import execute

pytestmark = pytest.mark.postgres

EVENTS = 20_000
RUNS = 200
READER = ConsumerName("reader")
STREAM = StreamName("run-r7")

FILL = f"""
insert into events (xid, id, stream, version, type, schema_version, data, run_id, correlation)
select (n / 100)::text::xid8, md5(n::text)::uuid, 'run-r' || n % {RUNS}, n / {RUNS} + 1,
       'rl.run.warned', 1, '{{"run": "r", "step": 1, "message": "x"}}', 'r' || n % {RUNS}, md5('c')::uuid
from generate_series(0, {EVENTS - 1}) n;
insert into streams select stream, max(version) from events group by stream;
insert into inbox (consumer, event_id) select 'reader', id from events order by position limit 1000;
analyze events; analyze inbox; analyze streams;
"""


class Asked:
    """A pool that remembers its queries."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.said: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(sql: str, *arguments: object) -> Any:
            self.said.append((sql, arguments))
            return await getattr(self._pool, name)(sql, *arguments)

        return call


@pytest.fixture
async def filled(database: Database) -> AsyncIterator[tuple[PostgresLog, Asked]]:
    await execute(database.url, FILL)
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        asked = Asked(database.durable)
        log._pool = cast("Pool", asked)
        yield log, asked


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


async def walked(database: Database, asked: Asked) -> list[str]:
    """The queries that read the whole log."""
    found = []
    for sql, arguments in asked.said:
        told = await database.durable.fetchval(f"explain (format json) {sql}", *arguments)
        plan = json.loads(told) if isinstance(told, str) else told
        found += [
            f"{node['Node Type']} on {node['Relation Name']}: {sql}"
            for node in nodes(plan[0]["Plan"])
            if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "events"
        ]
    return found


async def test_every_query_per_message_uses_an_index(
    filled: tuple[PostgresLog, Asked], database: Database
) -> None:
    log, asked = filled
    page, cursor = await log.tail(Cursor(), limit=100)
    assert len(page) == 100
    await log.tail(cursor, limit=100)
    head = await log.visible_head()
    assert not await log.has_events_after(head)
    assert len((await log.load({STREAM: 90}, limit=5000))[STREAM]) == 10
    await log.versions([STREAM])
    await log.events_at([(STREAM, 3)])
    await log.unconsumed_at({(STREAM, 3): [READER]})
    assert len(await log.unconsumed([(READER, recorded) for recorded in page])) == 0
    await log.filter_consumed([(READER, EventId(uuid4()))])
    await log.read("r7", after=cursor, limit=50)
    assert len(asked.said) == 11
    assert not await walked(database, asked)


async def test_twin_without_its_index_the_tail_walks_through_everything(
    filled: tuple[PostgresLog, Asked], database: Database
) -> None:
    log, asked = filled
    await execute(database.url, "drop index events_tail")
    await log.tail(Cursor(), limit=100)
    assert await walked(database, asked)


async def test_the_last_answer_to_a_commit_status_has_an_index_of_its_own(
    filled: tuple[PostgresLog, Asked], database: Database
) -> None:
    """A workspace whose forge was never asked has no such answer among all its events."""
    await execute(
        database.url,
        "insert into workspaces (workspace, name, url, created_at) values ('r7', 'w', '/r', now())",
    )
    registry, asked = Registry(database), Asked(database.durable)
    registry._pool = cast("Pool", asked)
    assert await registry.workspace("r7") is not None
    [(sql, arguments)] = asked.said
    told = await database.durable.fetchval(f"explain (format json) {sql}", *arguments)
    plan = json.loads(told) if isinstance(told, str) else told
    assert {"events_posted", "events_stream"} <= {
        node.get("Index Name") for node in nodes(plan[0]["Plan"])
    }
    assert not await walked(database, asked)
