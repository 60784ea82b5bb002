"""Apply `sql/migrations/*.sql` in order, each once, under an advisory lock, with its checksum.

The table `migrations` records what was applied; a file that changed after it was applied is refused,
for the database no longer is what the code thinks."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from schemas.errors import InvalidConfig

DIRECTORY = Path(__file__).parent / "sql" / "migrations"

LOCK = 0x48454144
"""The advisory lock of all migrations ("HEAD")."""


@dataclass(frozen=True, slots=True)
class Migration:
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> tuple[Migration, ...]:
    """All migrations, in order of their numbers."""
    return tuple(Migration(path.stem, path.read_text()) for path in sorted(DIRECTORY.glob("*.sql")))


async def migrate(url: str) -> tuple[str, ...]:
    """Bring the database up to date; returns the names that were applied now.

    Raises InvalidConfig when an applied migration is unknown here (the database is newer than this
    code) or differs from the file of its name.
    """
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("select pg_advisory_xact_lock($1)", LOCK)
            await connection.execute(
                "create table if not exists migrations (name text primary key,"
                " checksum text not null, applied_at timestamptz not null default now())"
            )
            rows = await connection.fetch("select name, checksum from migrations")
            applied = {row["name"]: row["checksum"] for row in rows}
            due = _due(applied)
            for migration in due:
                await connection.execute(migration.sql)
                await connection.execute(
                    "insert into migrations (name, checksum) values ($1, $2)",
                    migration.name,
                    migration.checksum,
                )
            return tuple(migration.name for migration in due)
    finally:
        await connection.close()


def _due(applied: dict[str, str]) -> tuple[Migration, ...]:
    known = migrations()
    strangers = sorted(set(applied) - {migration.name for migration in known})
    if strangers:
        raise InvalidConfig(
            f"the database has migrations this version does not know ({', '.join(strangers)}); "
            "upgrade Headrace"
        )
    for migration in known:
        if applied.get(migration.name, migration.checksum) != migration.checksum:
            raise InvalidConfig(
                f"migration {migration.name} was changed after it was applied; restore the file, "
                "and put the change into a new migration"
            )
    return tuple(migration for migration in known if migration.name not in applied)
