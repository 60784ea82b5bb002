"""`schema.sql` is the result of the migrations: both make the same database, as pg_dump describes
it."""

import asyncio
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.operations.local import embedded_postgres
from infra.spine.postgres.migrate import BASE, DIRECTORY, migrate, migrations
from tests.kit.postgres import bare_database, execute

SCHEMA = DIRECTORY.parent / "schema.sql"

HEADING = re.compile(r"^--\n-- Name: (.+); Type: (.+); Schema: .*\n--\n", re.M)
"""The comment that pg_dump writes before each object."""

NOISE = re.compile(r"('[^']*')|--[^\n]*|^\\\w+ \w+$", re.M)
"""A literal, which is kept, or a comment or a command of psql."""

Objects = Mapping[str, str]


@pytest.fixture(scope="module")
def migrated(postgres_url: str) -> Objects:
    with bare_database(postgres_url) as url:
        asyncio.run(migrate(url))
        return dump(url)


def test_each_migration_has_a_number_of_its_own() -> None:
    """Two that were written at the same time would else be applied in the order of their names."""
    numbers = [int(migration.name[:4]) for migration in migrations()]
    assert numbers == list(range(int(BASE[:4]), int(BASE[:4]) + len(numbers)))


@contextmanager
def database_of_the_page(postgres_url: str) -> Iterator[str]:
    """A database that is made from schema.sql."""
    with bare_database(postgres_url) as url:
        asyncio.run(execute(url, SCHEMA.read_text()))
        yield url


def dump(url: str) -> Objects:
    """Each object of a database, by kind and name, as the statements that make it. Comments and white
    space are dropped, in the bodies of functions too."""
    place = embedded_postgres.Place(Path(), Path(), None)
    program = embedded_postgres._binaries(place) / "pg_dump"
    done = subprocess.run(
        [str(program), "--schema-only", "--no-owner", url],
        capture_output=True,
        text=True,
        check=True,
    )
    _, *parts = HEADING.split(done.stdout)
    objects: dict[str, str] = {}
    for name, kind, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        statements = NOISE.sub(lambda found: found[1] or "", text)
        key = f"{kind} {name}"
        assert key not in objects, key
        objects[key] = " ".join(statements.split())
    assert len(objects) > 100
    return objects


def differences(one: Objects, other: Objects) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def test_the_migrations_end_in_schema_sql(migrated: Objects, postgres_url: str) -> None:
    with database_of_the_page(postgres_url) as url:
        page = dump(url)
    wrong = [
        f"{name}\n  migrations: {migrated.get(name)}\n  schema.sql: {page.get(name)}"
        for name in differences(migrated, page)
    ]
    assert not wrong, "bring infra/spine/postgres/sql/schema.sql up to date:\n" + "\n".join(wrong)


CHANGES = {
    "alter table runs add column later text": "TABLE runs",
    "alter table effects alter column attempts set default 1": "TABLE effects",
    "alter table effects set (fillfactor = 70)": "TABLE effects",
    "alter table run_gates drop constraint run_gates_state_check": "TABLE run_gates",
    "drop index events_edge": "INDEX events_edge",
    "drop trigger events_are_facts on events": "TRIGGER events events_are_facts",
    "alter function own_horizon security invoker": "FUNCTION own_horizon(pg_snapshot)",
    "create or replace function shut_effects() returns trigger language plpgsql as"
    " 'begin return new; end'": "FUNCTION shut_effects()",
    "grant update on events to headrace_worker": "ACL TABLE events",
    "grant execute on function grant_processes to public": "ACL FUNCTION grant_processes()",
    "alter default privileges in schema public revoke delete on tables from headrace_worker": (
        "DEFAULT ACL DEFAULT PRIVILEGES FOR TABLES"
    ),
}


@pytest.mark.parametrize("statement", CHANGES)
def test_twin_a_change_of_one_alone_is_seen(
    migrated: Objects, postgres_url: str, statement: str
) -> None:
    with database_of_the_page(postgres_url) as url:
        asyncio.run(execute(url, statement))
        assert differences(migrated, dump(url)) == [CHANGES[statement]]


def test_every_line_of_a_function_counts_but_comments() -> None:
    assert NOISE.sub(lambda found: found[1] or "", "select '--' -- why\n, 1") == "select '--' \n, 1"
