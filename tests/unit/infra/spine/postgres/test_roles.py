"""Processes of the product may not change the database beyond their role, on the embedded default
and on a server. Each protection is enough by itself, and without both the same statement
succeeds."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from infra.operations.local.free_port import free_port
from infra.readmodel.store import ReadModel
from infra.settings.settings import DatabaseLimits
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import ROLE, Database, administering, connect
from schemas.errors import InvalidConfig, TransientError
from schemas.events import RunWarned
from tests.kit.postgres import database_of, execute

pytestmark = pytest.mark.postgres

REWRITES = (
    "update events set run_id = 'another'",
    "delete from events",
    "truncate events",
)


@pytest.fixture(scope="module", params=["embedded", "server"])
def postgres_url(request: pytest.FixtureRequest) -> str:
    name = "server_url" if request.param == "server" else "embedded_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def filled(database: Database) -> AsyncIterator[Database]:
    async with Notifier(database) as notifier:
        event = RunWarned(run="r", step=1, message="look")
        await PostgresLog(database, notifier).append([event], cause=uuid4())
        yield database


async def test_a_process_cannot_rewrite_an_event(filled: Database) -> None:
    for rewrite in REWRITES:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await filled.durable.execute(rewrite)


async def test_the_owner_of_the_table_cannot_either(filled: Database) -> None:
    async with administering(filled.url) as owner:
        for rewrite in REWRITES:
            with pytest.raises(asyncpg.PostgresError, match="events are facts") as refused:
                await owner.execute(rewrite)
            assert refused.value.sqlstate == "HR003"


async def test_twin_the_trigger_holds_without_the_grants(filled: Database) -> None:
    await execute(filled.url, f"grant all on events to {ROLE}")
    for rewrite in REWRITES:
        with pytest.raises(asyncpg.PostgresError, match="events are facts"):
            await filled.durable.execute(rewrite)


async def test_twin_the_grants_hold_without_the_trigger(filled: Database) -> None:
    await execute(filled.url, "drop trigger events_are_facts on events")
    for rewrite in REWRITES:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await filled.durable.execute(rewrite)


async def test_twin_without_both_it_is_rewritten(filled: Database) -> None:
    await execute(filled.url, f"grant all on events to {ROLE}")
    await execute(filled.url, "drop trigger events_are_facts on events")
    assert [await filled.durable.execute(rewrite) for rewrite in REWRITES] == [
        "UPDATE 1",
        "DELETE 1",
        "TRUNCATE TABLE",
    ]


SCHEMA_CHANGES = (
    "drop table events",
    "drop table effects",
    "alter table events disable trigger all",
    "create or replace function refuse_rewriting() returns trigger language plpgsql as 'begin end'",
    "insert into migrations (name, checksum) values ('x', 'y')",
    "delete from migrations",
    "update artifacts set data = ''",
    "create table mine (n integer)",
    "create role mine",
    f"alter role {ROLE} superuser",
    "copy events to program 'cat'",
)


async def test_a_process_cannot_change_the_schema(database: Database) -> None:
    for statement in SCHEMA_CHANGES:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await database.lazy.execute(statement)


async def test_a_process_can_do_its_work(filled: Database) -> None:
    assert await filled.durable.fetchval("select current_user") == ROLE
    assert await ReadModel(filled).platform.horizon_age_s() < 60
    await ReadModel(filled).reset()


async def test_tables_of_later_migrations_are_open_to_processes(database: Database) -> None:
    await execute(database.url, "create table later (n integer)")
    await database.durable.execute("insert into later values (1)")


async def test_an_owner_who_is_no_superuser_can_migrate(postgres_url: str) -> None:
    user, name = f"u{uuid4().hex[:12]}", f"t{uuid4().hex[:12]}"
    await execute(postgres_url, f"create role {user} login createrole password 'x'")
    await execute(postgres_url, f"grant {ROLE} to {user} with admin option")
    await execute(postgres_url, f"create database {name} owner {user}")
    own = _as(database_of(postgres_url, name), user)
    try:
        await migrate(own)
        async with connect(own, size=1) as database:
            assert await database.durable.fetchval("select count(*) from events") == 0
            assert await ReadModel(database).platform.horizon_age_s() < 60
    finally:
        await execute(postgres_url, f"drop database {name} with (force)")
        await execute(postgres_url, f"drop role {user}")


async def test_a_login_of_ones_own_needs_only_the_role(database_url: str) -> None:
    """The owner migrates; processes may log in as another user, which owns nothing."""
    user = f"u{uuid4().hex[:12]}"
    await execute(database_url, f"create role {user} login password 'x' in role {ROLE}")
    own = _as(database_url, user)
    try:
        async with connect(own, size=1) as database:
            assert await database.durable.fetchval("select session_user") == user
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await database.durable.execute("delete from events")
        await execute(database_url, f"revoke {ROLE} from {user}")
        with pytest.raises(InvalidConfig, match=f"grant {ROLE}"):
            async with connect(own, size=1):
                pass
        with pytest.raises(InvalidConfig, match=r"may not migrate .*permission denied.* its owner"):
            await migrate(own)
    finally:
        await execute(database_url, f"drop role {user}")


async def test_an_idle_transaction_and_a_long_statement_are_ended(database_url: str) -> None:
    limits = DatabaseLimits(statement_s=1, idle_in_transaction_s=1)
    async with connect(database_url, size=1, limits=limits) as database:
        with pytest.raises(TransientError, match="statement timeout"):
            await database.durable.fetchval("select pg_sleep(30)")
        with pytest.raises(TransientError):
            await _idle_in_a_transaction(database)
        assert await database.durable.fetchval("select 1") == 1


async def _idle_in_a_transaction(database: Database) -> None:
    async with database.durable.acquire() as connection, connection.transaction():
        await connection.execute("select 1")
        async with asyncio.timeout(60):
            while not connection.is_closed():
                await asyncio.sleep(0.05)
        await connection.execute("select 1")


async def test_no_server_and_no_database_are_told_apart(database_url: str) -> None:
    with pytest.raises(TransientError, match="no Postgres answers"):
        async with connect(f"postgresql://postgres@127.0.0.1:{free_port()}/x", size=1):
            pass
    with pytest.raises(InvalidConfig, match="opens no database"):
        async with connect(database_of(database_url, "nowhere"), size=1):
            pass


@pytest.mark.parametrize("part", ["login", "database"])
async def test_a_migration_with_a_wrong_url_says_that_it_opens_no_database(
    database_url: str, part: str
) -> None:
    wrong = _as(database_url, "nobody") if part == "login" else database_of(database_url, "nowhere")
    with pytest.raises(InvalidConfig, match="HEADRACE_DATABASE_URL opens no database"):
        await migrate(wrong)


def _as(url: str, user: str) -> str:
    parts = urlsplit(url)
    if parts.hostname is None:
        return url.replace("user=postgres", f"user={user}")
    return f"{parts.scheme}://{user}:x@{parts.hostname}:{parts.port}{parts.path}"
