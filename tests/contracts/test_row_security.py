"""The database shows a request only rows of the workspaces that its sender may see, even to a query
that filters by nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from infra.spine.ports.visible_workspaces import VISIBLE
from infra.spine.postgres.pool import Database, administering, connect
from infra.spine.postgres.row_security import SHOW, ConfinedConnection

pytestmark = pytest.mark.postgres

TABLES = {
    "runs": "insert into runs (run, name, algorithm, execution_mode, model, dataset, config,"
    " dataset_ref, created_at, workspace)"
    " values ($1, 'n', 'grpo', 'sync', 'm', 'd', '{}', '{}', now(), $2)",
    "evaluations": "insert into evaluations (evaluation, name, model, dataset, dataset_ref, total,"
    " created_at, workspace) values ($1, 'n', 'm', 'd', '{}', 1, now(), $2)",
    "evaluation_imports": "insert into evaluation_imports (id, evaluation, number, workspace, content)"
    " values ($1, 'e', 1, $2, '{}')",
    "workspaces": "insert into workspaces (workspace, name, url, created_at)"
    " values ($2, $1, 'u', now())",
    "deliveries": "insert into deliveries (event, workspace, kind, at) values ($1, $2, 'push', now())",
    "deployments": "insert into deployments (deployment, workspace, created_at)"
    " values ($1, $2, now())",
    "pushes": None,
    "triggered_runs": None,
}
"""Each table with a policy, and a statement that adds a row ($1 an id, $2 its workspace); None where the
other tables show the same policy."""

WITHOUT_POLICY = {
    "admitted_amounts": "quotas count what others use, too",
    "admitted_runs": "quotas count what others use, too",
    "alert_targets": "its queries name one workspace, and a process that sends alerts reads all",
    "api_keys": "the guard finds the sender in it",
    "audit": "the list of an operator",
    "connections": "a webhook finds its workspace in it",
    "dataset_uploads": "an upload without a workspace belongs to an organisation",
    "datasets": "a dataset without a workspace belongs to an organisation",
    "device_logins": "a login waits before anybody has approved it",
    "effects": "the work of processes",
    "owner_quotas": "quotas of requests are read for all workspaces at once",
    "run_gates": "the work of processes",
    "uploads": "an upload without a workspace belongs to an organisation",
    "workspace_homes": "the guard finds in it what the sender sees",
    "workspace_quotas": "a claim of samples reads all",
}
"""The other tables with a column `workspace`, each with the reason."""


@pytest_asyncio.fixture
async def narrow(database_url: str) -> AsyncIterator[Database]:
    """A database with rows of the workspaces a and b, over one connection."""
    async with connect(database_url, size=1) as database:
        for table, insert in TABLES.items():
            if insert:
                for place in ("a", "b"):
                    await database.durable.execute(insert, f"{table}-{place}", place)
        yield database


@contextmanager
def shown(*workspaces: str) -> Iterator[None]:
    token = VISIBLE.set(frozenset(workspaces))
    try:
        yield
    finally:
        VISIBLE.reset(token)


async def places(database: Database, table: str) -> list[str]:
    """The workspaces of all rows that a query without a filter gets."""
    rows = await database.durable.fetch(f"select workspace from {table} order by workspace")
    return [row["workspace"] for row in rows]


@pytest.mark.parametrize("table", [table for table, insert in TABLES.items() if insert])
async def test_a_query_without_a_filter_gets_rows_of_visible_workspaces(
    narrow: Database, table: str
) -> None:
    assert await places(narrow, table) == ["a", "b"]
    with shown("a"):
        assert await places(narrow, table) == ["a"]
        with shown("b", 'of "others"', "c\\"):
            assert await places(narrow, table) == ["b"]
    with shown():
        assert await places(narrow, table) == []
    assert await places(narrow, table) == ["a", "b"]


async def test_a_row_of_others_is_neither_changed_nor_made(narrow: Database) -> None:
    with shown("a"):
        assert await narrow.durable.execute("update runs set name = 'x'") == "UPDATE 1"
        assert await narrow.durable.execute("delete from runs where workspace = 'b'") == "DELETE 0"
        with pytest.raises(Exception, match="row-level security"):
            await narrow.durable.execute(TABLES["runs"] or "", "r9", "b")


async def test_a_connection_whose_setting_was_interrupted_shows_the_next_caller_its_own_rows(
    narrow: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has one connection: whatever ends its caller, the next one gets it."""
    tell = ConfinedConnection.execute

    async def tell_and_fail(self: ConfinedConnection, query: str, *values: Any) -> Any:
        answer = await tell(self, query, *values)
        if query == SHOW:
            raise failure
        return answer

    failure: BaseException
    for failure in (RuntimeError("lost"), asyncio.CancelledError()):
        with monkeypatch.context() as patch, shown("a"):
            patch.setattr(ConfinedConnection, "execute", tell_and_fail)
            with pytest.raises(type(failure)):
                await places(narrow, "runs")
        assert await places(narrow, "runs") == ["a", "b"]
        with shown("b"):
            assert await places(narrow, "runs") == ["b"]


@pytest.mark.parametrize("ends", ["error", "cancelled"])
async def test_a_transaction_that_fails_leaves_its_setting_to_nobody(
    narrow: Database, ends: str
) -> None:
    async def work() -> None:
        with shown("a"):
            async with narrow.durable.acquire() as connection, connection.transaction():
                await connection.execute("select count(*) from runs")
                if ends == "error":
                    await connection.execute("select 1 / 0")
                await connection.execute("select pg_sleep(30)")

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0.2)
    working.cancel()
    await asyncio.wait([working])
    assert await places(narrow, "runs") == ["a", "b"]
    with shown("b"):
        assert await places(narrow, "runs") == ["b"]


async def test_a_prepared_statement_follows_the_setting(narrow: Database) -> None:
    """The driver prepares each statement once for a connection, and keeps its plan."""
    for _ in range(8):  # after five executions PostgreSQL may keep a plan for all values
        for one in ("a", "b"):
            with shown(one):
                found = await narrow.durable.fetch(
                    "select workspace from runs where name = $1 order by workspace", "n"
                )
                assert [row["workspace"] for row in found] == [one]


async def test_a_validation_is_shown_with_its_run(narrow: Database) -> None:
    for place in ("a", "b"):
        await narrow.durable.execute(
            "insert into evaluations (evaluation, run, name, model, dataset, dataset_ref, total,"
            " created_at) values ($1, $2, 'n', 'm', 'd', '{}', 1, now())",
            f"{place}-v",
            f"runs-{place}",
        )
    with shown("a"):
        found = await narrow.durable.fetch(
            "select evaluation from evaluations where run is not null"
        )
    assert [row["evaluation"] for row in found] == ["a-v"]


async def test_twin_without_the_policy_rows_of_others_are_shown(
    narrow: Database, database_url: str
) -> None:
    async with administering(database_url) as owner:
        await owner.execute("alter table runs disable row level security")
    with shown("a"):
        assert await places(narrow, "runs") == ["a", "b"]


async def test_every_table_with_a_workspace_has_the_policy_or_a_reason(narrow: Database) -> None:
    found = await narrow.durable.fetch(
        "select c.relname, c.relrowsecurity from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relkind = 'r' and a.attname = 'workspace' and not a.attisdropped"
        " and c.relnamespace = current_schema()::regnamespace"
    )
    guarded = {row["relname"] for row in found if row["relrowsecurity"]}
    assert guarded == set(TABLES)
    assert {row["relname"] for row in found} - guarded == set(WITHOUT_POLICY)
