"""Applies `sql/migrations/*.sql` in order, each file once, under an advisory lock.

The table `migrations` records the name and checksum of each applied file. If a file changed after it was
applied, the migration is refused, because the database does not have the schema that the code expects. A
database that was restored into another cluster is repaired (`infra/spine/postgres/restored_dump.py`).
`python -m infra.spine.postgres.migrate` migrates the database of HEADRACE_DATABASE_URL, and
`headrace up` migrates at every start.

The first file, BASE, stands for the migrations 0001 to 0032. A database that has applied all of those
has its schema, and is stamped with it.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from infra.settings.settings import BadSetting, Settings
from infra.spine.postgres.pool import Database, administering
from infra.spine.postgres.restored_dump import repair_if_moved
from schemas.errors import HeadraceError, InvalidConfig

DIRECTORY = Path(__file__).parent / "sql" / "migrations"

BASE = "0032_base"
LAST_IN_BASE = "0032_rejected_uploads"

LOCK = 0x48454144
"""The advisory lock of all migrations ("HEAD")."""

TABLE = """
create table if not exists migrations (
    name       text primary key,
    checksum   text not null,
    applied_at timestamptz not null default now()
)
"""
"""The migrations that were applied."""


ENCODING = "select current_database() as name, current_setting('server_encoding') as encoding"


@dataclass(frozen=True, slots=True)
class Migration:
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> tuple[Migration, ...]:
    """Return all migrations, in order of their numbers."""
    return tuple(Migration(path.stem, path.read_text()) for path in sorted(DIRECTORY.glob("*.sql")))


async def migrate(url: str) -> tuple[str, ...]:
    """Apply all pending migrations. Returns the names of those that were applied now.

    Raises InvalidConfig when the URL opens no database, or its user may not change this one, when the
    database has another encoding than UTF8 or holds tables of somebody else, or when an applied
    migration is unknown here (the database is newer than this code) or differs from the file of its
    name; TransientError when the server does not answer.
    """
    try:
        return await _migrate(url)
    except asyncpg.InsufficientPrivilegeError as error:
        raise InvalidConfig(
            f"the user of HEADRACE_DATABASE_URL may not migrate the database ({error}): run `python -m "
            "infra.spine.postgres.migrate` as its owner or an administrator"
        ) from error
    except (asyncpg.DuplicateTableError, asyncpg.DuplicateObjectError) as error:
        raise InvalidConfig(
            f"the database at HEADRACE_DATABASE_URL holds something that no migration made ({error}): "
            "name an empty database, or restore the whole dump, with its table migrations"
        ) from error


async def _migrate(url: str) -> tuple[str, ...]:
    async with administering(url) as connection, connection.transaction():
        _refuse_encoding(await connection.fetchrow(ENCODING))
        await connection.execute("select pg_advisory_xact_lock($1)", LOCK)
        await connection.execute(TABLE)
        rows = await _read_applied(connection)
        applied = {row["name"]: row["checksum"] for row in rows}
        pending = pending_migrations(applied)
        if LAST_IN_BASE in applied and BASE not in applied:
            await _record(connection, migrations()[0])
        for migration in pending:
            await apply(connection, migration)
        await repair_if_moved(connection)
    return tuple(migration.name for migration in pending)


async def _read_applied(connection: Any) -> Any:
    """The name and checksum of each applied migration. Other programs have a table migrations too."""
    try:
        return await connection.fetch("select name, checksum from migrations")
    except asyncpg.UndefinedColumnError as error:
        raise InvalidConfig(
            "the database at HEADRACE_DATABASE_URL has a table migrations of another program "
            f"({error}): name an empty database"
        ) from error


def _refuse_encoding(row: Any) -> None:
    if row["encoding"] != "UTF8":
        raise InvalidConfig(
            f"the database {row['name']!r} at HEADRACE_DATABASE_URL has the encoding {row['encoding']}, "
            "which cannot hold every text: make another one (create database headrace "
            "template template0 encoding 'UTF8') and name that"
        )


async def apply(connection: Any, migration: Migration) -> None:
    """Apply one migration in the connection's transaction, and record it."""
    await connection.execute(migration.sql)
    await _record(connection, migration)


async def _record(connection: Any, migration: Migration) -> None:
    await connection.execute(
        "insert into migrations (name, checksum) values ($1, $2)",
        migration.name,
        migration.checksum,
    )


async def check(database: Database) -> None:
    """Raise InvalidConfig when the database does not have the schema of this code, or is not in UTF8."""
    _refuse_encoding(await database.durable.fetchrow(ENCODING))
    empty = await database.durable.fetchval("select to_regclass('migrations') is null")
    rows = [] if empty else await database.durable.fetch("select name, checksum from migrations")
    pending = pending_migrations({row["name"]: row["checksum"] for row in rows})
    if pending:
        names = ", ".join(migration.name for migration in pending)
        raise InvalidConfig(
            f"the database lacks {names}: run `python -m infra.spine.postgres.migrate` first"
        )


def pending_migrations(applied: Mapping[str, str]) -> tuple[Migration, ...]:
    """Return the migrations that are missing in a database with these applied ones (name -> checksum).
    Raises InvalidConfig when it has a migration that this code does not know, or a changed one, or when
    it is older than BASE."""
    known, applied = migrations(), applied_since_base(applied)
    strangers = sorted(set(applied) - {migration.name for migration in known})
    if strangers:
        raise InvalidConfig(
            f"the database has migrations this version does not know ({', '.join(strangers)}): it was "
            "used by a newer Headrace; upgrade this one"
        )
    for migration in known:
        if applied.get(migration.name, migration.checksum) != migration.checksum:
            raise InvalidConfig(
                f"migration {migration.name} was changed after it was applied; restore the file, "
                "and put the change into a new migration"
            )
    return tuple(migration for migration in known if migration.name not in applied)


def applied_since_base(applied: Mapping[str, str]) -> Mapping[str, str]:
    """Return these applied migrations (name -> checksum), with BASE in place of those that it stands
    for. Raises InvalidConfig when some of those were not applied."""
    inside = {name for name in applied if name < BASE or name == LAST_IN_BASE}
    if not inside:
        return applied
    numbers = {f"{number:04}" for number in range(1, int(BASE[:4]) + 1)}
    if missing := sorted(numbers - {name[:4] for name in inside}):
        raise InvalidConfig(
            f"the database lacks migration {missing[0]}, and this version begins at {BASE}: first "
            "migrate it by the commit before the one that added that file "
            f"(git log --diff-filter=A -- '*/{BASE}.sql'), then by this version"
        )
    since = {name: checksum for name, checksum in applied.items() if name not in inside}
    return {BASE: migrations()[0].checksum, **since}


def main() -> int:
    """Migrate the database that the settings name."""
    try:
        url = Settings.load(os.environ).database_url
        if url is None:
            raise BadSetting("HEADRACE_DATABASE_URL is not set: name the Postgres to migrate")
        applied = asyncio.run(migrate(url))
    except (HeadraceError, BadSetting) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"applied: {', '.join(applied) or 'nothing; the schema is up to date'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
