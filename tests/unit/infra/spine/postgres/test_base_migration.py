"""A database that applied the migrations one by one that are now one file goes on from there."""

import asyncio
from collections.abc import Sequence

import pytest

from infra.spine.postgres.migrate import (
    BASE,
    LAST_IN_BASE,
    TABLE,
    Migration,
    migrate,
    migrations,
    pending_migrations,
)
from infra.spine.postgres.pool import administering
from schemas.errors import InvalidConfig
from tests.kit.postgres import bare_database

pytestmark = pytest.mark.postgres

OLD = (*(f"{number:04}_former" for number in range(1, 32)), LAST_IN_BASE)
"""The names of migrations whose files are gone."""


async def write_former(url: str, names: Sequence[str], *, since: Sequence[Migration] = ()) -> None:
    """Make the schema of the base, as releases did that applied its migrations one by one."""
    async with administering(url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in (migrations()[0], *since):
            await connection.execute(migration.sql)
        rows = [*((name, "x") for name in names), *((one.name, one.checksum) for one in since)]
        await connection.executemany(
            "insert into migrations (name, checksum) values ($1, $2)", rows
        )


async def execute(url: str, statement: str) -> None:
    async with administering(url) as connection:
        await connection.execute(statement)


async def names_in(url: str) -> set[str]:
    async with administering(url) as connection:
        return {row["name"] for row in await connection.fetch("select name from migrations")}


@pytest.mark.parametrize("count", [0, 1, 20])
def test_a_database_with_the_former_migrations_gets_those_that_follow(
    postgres_url: str, count: int
) -> None:
    _, *later = migrations()
    with bare_database(postgres_url) as url:
        asyncio.run(write_former(url, OLD, since=later[:count]))
        assert asyncio.run(migrate(url)) == tuple(one.name for one in later[count:])
        assert asyncio.run(names_in(url)) == {*OLD, BASE, *(one.name for one in later)}
        assert asyncio.run(migrate(url)) == ()


def test_a_database_that_stopped_before_the_base_is_told_the_way(postgres_url: str) -> None:
    with bare_database(postgres_url) as url:
        asyncio.run(write_former(url, OLD[:19]))
        with pytest.raises(InvalidConfig, match=r"lacks migration 0020.*first migrate it by"):
            asyncio.run(migrate(url))
        assert asyncio.run(names_in(url)) == set(OLD[:19])


def test_a_database_with_tables_of_somebody_else_is_refused(postgres_url: str) -> None:
    """For example the tables of a dump that was restored without the table migrations."""
    with bare_database(postgres_url) as url:
        asyncio.run(write_former(url, ()))
        with pytest.raises(
            InvalidConfig, match=r"no migration made \(.*already exists\).* the whole"
        ):
            asyncio.run(migrate(url))
        assert asyncio.run(names_in(url)) == set()


def test_a_database_whose_migrations_are_of_another_program_is_refused(postgres_url: str) -> None:
    """Laravel, for example, has a table of this name."""
    theirs = "create table migrations (id serial primary key, migration text, batch int)"
    with bare_database(postgres_url) as url:
        asyncio.run(execute(url, theirs))
        with pytest.raises(InvalidConfig, match=r"migrations of another program .* name an empty"):
            asyncio.run(migrate(url))


def test_a_former_migration_is_known_whatever_its_checksum() -> None:
    """Its file is gone, so there is nothing to compare."""
    applied = dict.fromkeys(OLD, "x")
    assert pending_migrations(applied) == migrations()[1:]
    with pytest.raises(InvalidConfig, match="lacks migration 0017"):
        pending_migrations({name: "x" for name in OLD if not name.startswith("0017")})
    with pytest.raises(InvalidConfig, match="9999_later"):
        pending_migrations({**applied, "9999_later": "x"})
    with pytest.raises(InvalidConfig, match=f"{BASE} was changed"):
        pending_migrations({BASE: "x"})
