"""The hot queries use their indexes, also inside functions. The server itself reports each plan
(auto_explain), in a database that is large enough for the difference to show."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from infra.readmodel.store import ReadModel
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, Pool
from infra.spine.postgres.row_security import ConfinedConnection
from schemas.effects import Lane
from schemas.events import CheckpointFailed, RunWarned
from schemas.ids import ConsumerName, EventId, WorkerId, run_stream
from tests.kit.commits import commit_of
from tests.kit.postgres import execute, fresh_database

pytestmark = pytest.mark.postgres

READER = ConsumerName("reader")

FILL = (
    """insert into events
    (xid, id, stream, version, type, schema_version, data, run_id, correlation)
    select (1 + n / 100)::text::xid8, gen_random_uuid(), 'run-r' || n % 300, 1 + n / 300,
    'rl.run.warned', 1, json_build_object('run', 'r' || n % 300, 'step', n, 'message', repeat('x', 200)),
    'r' || n % 300, gen_random_uuid() from generate_series(0, 29999) n""",
    "insert into streams select stream, max(version) from events group by stream",
    "insert into streams select 'group-r-' || n, 1 from generate_series(0, 19999) n",
    """insert into inbox (consumer, event_id, xid) select 'c' || position % 20, id, xid
    from events where position > 10000""",
    """insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)
    select id, 'reader', 'checkpoint-' || run_id,
    (array['control', 'user', 'generate'])[1 + position % 3], run_id, 'fetch_commit', '{}', id
    from events where position % 2 = 0""",
    "insert into run_gates select 'r' || n, 'open' from generate_series(0, 299) n",
    "insert into workers (id, host, pid, expires_at)"
    " values ('w', 'h', 1, now() + interval '1 day')",
    "analyze",
)

EXPLAIN = {
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_nested_statements": "on",
    "auto_explain.log_format": "json",
    "auto_explain.log_level": "notice",
}

SMALL = {"workers", "run_gates", "watermarks", "worker_doors"}
"""Tables of a page or two, where reading all is the best plan."""


@pytest.fixture(scope="module")
def large_url(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        for statement in FILL:
            asyncio.run(execute(url, statement))
        yield url


class Plans:
    """The plans of the statements that ran since the last look."""

    def __init__(self) -> None:
        self._said: list[str] = []

    def hear(self, _: object, message: Any) -> None:
        if "plan:" in message.message:
            self._said.append(message.message.split("plan:", 1)[1])

    def take(self) -> list[dict[str, Any]]:
        """Every node of every plan: its kind (`Node Type`) and its details."""
        nodes: list[dict[str, Any]] = []
        for text in self._said:
            self._walk(json.loads(text)["Plan"], nodes)
        self._said.clear()
        return nodes

    def _walk(self, node: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        nodes.append(node)
        for child in node.get("Plans", ()):
            self._walk(child, nodes)


class OneConnection:
    """The part of a pool that `Pool` needs; a real pool would insist on getting its connections back."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._free = asyncio.Lock()

    async def acquire(self, *, timeout: float) -> Any:
        await asyncio.wait_for(self._free.acquire(), timeout)
        return self._connection

    async def release(self, _: Any, *, timeout: float) -> None:
        del timeout
        self._free.release()


@asynccontextmanager
async def explained(url: str) -> AsyncIterator[tuple[Database, Plans]]:
    plans = Plans()
    connection = await asyncpg.connect(url, connection_class=ConfinedConnection)
    await connection.execute("load 'auto_explain'")
    for name, value in EXPLAIN.items():
        await connection.execute(f"set {name} = '{value}'")
    connection.add_log_listener(plans.hear)
    pool = Pool(OneConnection(connection), 1)
    try:
        yield Database(url=url, durable=pool, lazy=pool), plans
    finally:
        connection.terminate()


def by_index(plans: Plans, *indexes: str) -> None:
    """These indexes were used, and no table that grows was read as a whole."""
    nodes = plans.take()
    read = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
    read = {name for name in read if not name.startswith("pg_")}  # the client asks about types
    assert read <= SMALL, f"read as a whole: {read - SMALL}"
    used = {node["Index Name"] for node in nodes if "Index Name" in node}
    assert set(indexes) <= used, f"used were {used}"


async def test_hot_queries_use_their_indexes(large_url: str) -> None:
    async with explained(large_url) as (database, plans), Notifier(database) as notifier:
        log, effects = PostgresLog(database, notifier), PostgresEffects(database)
        await log.visible_head()
        by_index(plans, "events_tail")
        late = await database.durable.fetchrow(
            "select xid, position from events order by position offset 29700 limit 1"
        )
        plans.take()
        after = Cursor(late["xid"], late["position"])
        events, _ = await log.tail(after, limit=100)
        by_index(plans, "events_tail")
        assert await log.has_events_after(after)
        by_index(plans, "events_tail")
        await log.load({run_stream("r7"): 90})
        by_index(plans, "events_stream")
        await log.events_at([(run_stream("r7"), 3)])
        by_index(plans, "events_stream")
        await log.unconsumed_at({(run_stream("r7"), 3): [READER]})
        by_index(plans, "events_stream", "inbox_pkey")
        await log.read("r7", after=after, limit=100)
        by_index(plans, "events_run")
        await log.versions([run_stream("r7")])
        by_index(plans, "streams_pkey")
        await log.unconsumed([(READER, event) for event in events])
        by_index(plans, "inbox_pkey")
        await effects.next_due_s(WorkerId("w"), lanes=[Lane.TRAIN], consumers=[READER])
        by_index(plans, "effects_later", "effects_held")


async def test_writing_and_forgetting_use_their_indexes(large_url: str) -> None:
    async with explained(large_url) as (database, plans), Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        failed = CheckpointFailed(run="r7", step=1, message="x")
        consumed = ((READER, EventId(uuid4())),)
        await log.commit(commit_of(failed, consumed=consumed))
        by_index(plans)
        await log.commit(commit_of(failed, 2))
        by_index(plans, "streams_pkey")
        await log.advance([ConsumerName("c3")], Cursor(2**40, 0))
        by_index(plans, "inbox_pkey")
        warned, cause = RunWarned(run="r8", step=1, message="x"), uuid4()
        await log.append([warned], cause=cause)
        plans.take()
        await log.append([warned], cause=cause)
        by_index(plans, "events_edge")


async def test_queries_of_the_pages_of_a_run_use_indexes(large_url: str) -> None:
    async with explained(large_url) as (database, plans):
        await database.durable.fetch(
            "select 'waiting: ' || error from effects where run_id = 'r7' and error is not null"
        )
        by_index(plans, "effects_run")
        await ReadModel(database).runs.get_run("r7")
        read = {n["Relation Name"] for n in plans.take() if n["Node Type"] == "Seq Scan"}
        assert not read & {"events", "effects", "inbox"}


async def test_twin_without_the_index_it_is_seen(large_url: str) -> None:
    async with explained(large_url) as (database, plans), database.durable.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("drop index events_stream")
        await connection.fetch("select * from events where stream = 'run-r7' and version > 90")
        await transaction.rollback()
    with pytest.raises(AssertionError, match="read as a whole"):
        by_index(plans)
