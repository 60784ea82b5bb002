"""Each service of a cluster logs in to the database with a role of its own, which cannot do more than it
needs."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from consumers.process.accounts import consumed_types
from consumers.process.command import HOSTABLE
from infra.operations.maintenance.service_roles import LIMITED, PRIVATE, TABLES, make_service_roles
from infra.settings.accounts import DATABASE_ACCOUNTS, load_accounts
from infra.spine.postgres import pool
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.migrate import check
from infra.spine.postgres.pool import ROLE, connect, role_of
from schemas.effects import Lane
from schemas.errors import InvalidConfig
from schemas.ids import ConsumerName, WorkerId
from tests.kit.postgres import execute, fresh_database
from tests.stack.accounts import url_of_service

pytestmark = pytest.mark.postgres

SERVICES = ("api", *HOSTABLE)
ACCOUNTS = {service: f"{service}x7Kq".ljust(24, "0") for service in SERVICES}


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    """A database with a role for each service, as its owner."""
    with fresh_database(server_url) as made:
        asyncio.run(make_service_roles(made, ACCOUNTS))
        yield made
        name = urlsplit(made).path.lstrip("/")
        for service in SERVICES:
            asyncio.run(execute(made, f'drop owned by "{name}_{service}"'))
            asyncio.run(execute(made, f'drop role "{name}_{service}"'))


MAY_REMOVE_RUNS = f"select pg_has_role(session_user, '{ROLE}', 'member')"
"""What `begin_removal` of the schema asks for."""


def as_service(url: str, service: str, password: str | None = None) -> str:
    """The URL with which a service logs in."""
    return url_of_service(url, service, password or ACCOUNTS[service])


async def test_every_service_works_as_its_own_role_and_changes_no_schema(url: str) -> None:
    for service in SERVICES:
        own = as_service(url, service)
        async with connect(own, size=1) as database:
            await check(database)
            assert await database.durable.fetchval("select current_user") == role_of(own)
            for statement in (
                "drop table events",
                "update events set run_id = 'another'",
                "delete from events",
                "create table mine (n integer)",
                "create role mine",
                "set role postgres",
                "delete from migrations",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await database.lazy.execute(statement)


def test_only_a_service_works_as_the_user_of_its_url() -> None:
    """An owner whose name begins with that of the database could drop the tables."""
    assert set(pool.SERVICES) == set(consumed_types())
    assert role_of("postgresql://headrace_learn:x@host/headrace") == "headrace_learn"
    for user in ("headrace", "headrace_owner", "headrace_", "other_learn", "headrace_worker"):
        assert role_of(f"postgresql://{user}:x@host/headrace") == ROLE


async def test_a_service_reads_no_credentials_that_it_does_not_need(url: str) -> None:
    for service in HOSTABLE:
        async with connect(as_service(url, service), size=1) as database:
            for table, needed in PRIVATE.items():
                if service in needed:
                    await database.durable.fetchval(f"select count(*) from {table}")
                    continue
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await database.durable.fetchval(f"select count(*) from {table}")


async def test_every_service_claims_work(url: str) -> None:
    """A claim compares what is held with the quotas of workspaces."""
    for service in HOSTABLE:
        async with connect(as_service(url, service), size=1) as database:
            effects, worker = PostgresEffects(database), WorkerId(service)
            await effects.register(worker, host="h", pid=1, lease_s=60)
            consumers = [ConsumerName(service)]
            assert not await effects.claim(worker, room={Lane.GENERATE: 4}, consumers=consumers)
            limit = "select sample_limit('a workspace', 7)"
            assert await database.durable.fetchval(limit) == 7


async def test_only_the_api_rewrites_what_it_shows(url: str) -> None:
    async with connect(as_service(url, "learn"), size=1) as database:
        assert await database.durable.fetchval("select count(*) from runs") == 0
        for statement in ("delete from runs", "truncate runs", "update evaluations set run = ''"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await database.durable.execute(statement)
        assert not await database.durable.fetchval(MAY_REMOVE_RUNS)
    async with connect(as_service(url, "api"), size=1) as database:
        await database.durable.execute("delete from runs")
        await database.durable.fetchval("select count(*) from secrets")
        assert await database.durable.fetchval(MAY_REMOVE_RUNS)


WAITING = """
insert into run_gates (run_id, state, workspace) values ('r', 'open', 'ws');
insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, workspace)
select gen_random_uuid(), 'rollout', 's', 'generate', 'r', 't', '{}', gen_random_uuid(), 'ws'
"""


@pytest.mark.parametrize("samples", [None, 0])
async def test_every_service_may_claim_work(url: str, samples: int | None) -> None:
    """A claim compares samples in flight with the quotas, which only the API changes."""
    await execute(url, WAITING)
    await execute(url, "insert into workspace_quotas values ('ws', 'samples_in_flight', 0)")
    for service in HOSTABLE:
        async with connect(as_service(url, service), size=1) as database:
            effects, worker = PostgresEffects(database), WorkerId(f"w-{service}")
            await effects.register(worker, host="h", pid=1, lease_s=60)
            room, reads = {Lane.GENERATE: 1}, [ConsumerName("rollout")]
            assert await effects.claim(worker, room=room, consumers=reads, samples=samples) == []
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await database.durable.execute("delete from workspace_quotas")


async def test_the_table_names_exist_for_a_renamed_one_would_be_open_to_all(url: str) -> None:
    async with connect(as_service(url, "api"), size=1) as database:
        tables = {row["tablename"] for row in await database.durable.fetch(TABLES)}
    assert set(PRIVATE) | set(LIMITED) <= tables
    assert {service for needed in PRIVATE.values() for service in needed} <= set(HOSTABLE)


async def test_a_table_with_sealed_values_is_private(url: str) -> None:
    async with connect(as_service(url, "api"), size=1) as database:
        rows = await database.durable.fetch(
            "select distinct table_name from information_schema.columns"
            " where table_schema = 'public' and data_type = 'bytea' and column_name <> 'data'"
        )
    assert {row["table_name"] for row in rows} <= set(PRIVATE)


async def test_a_service_has_no_other_password_than_the_last(url: str) -> None:
    await make_service_roles(url, {"learn": "another0another0"})
    with pytest.raises(InvalidConfig, match="opens no database"):
        async with connect(as_service(url, "learn"), size=1):
            pass
    async with connect(as_service(url, "learn", "another0another0"), size=1) as database:
        await check(database)


async def test_a_service_cannot_make_roles(url: str) -> None:
    with pytest.raises(InvalidConfig, match="name an owner"):
        await make_service_roles(as_service(url, "learn"), {"grade": "another0another0"})


@pytest.mark.parametrize(
    "value",
    ["api", "api=short", "Api=0123456789abcdef", "api=0123456789abcde'", "=0123456789abcdef"],
)
def test_a_bad_account_is_refused_without_its_password(value: str) -> None:
    with pytest.raises(ValueError, match="is not SERVICE=PASSWORD") as refused:
        load_accounts({DATABASE_ACCOUNTS: f"run=0123456789abcdef,{value}"}, DATABASE_ACCOUNTS)
    assert "0123456789" not in str(refused.value)
    assert "entry 2" in str(refused.value)
