"""Restores a backup into an empty database and blob store: blobs first, then the database in one
transaction.

An interrupted restore can be run again, because blobs that are already there are kept and the database
has all rows or none. The migrations that follow bring an older backup to today's schema. In another
cluster they also repair the transaction ids (`infra/spine/postgres/restored_dump.py`). Runs then
continue from the moment of the backup.
"""

import hashlib
from pathlib import Path
from typing import Any

from infra.blobs.installation import adopt, whereabouts
from infra.operations.maintenance.backup import (
    BLOBS,
    TABLES,
    Blob,
    Contents,
    Table,
    contents_of,
    sha256_of,
)
from infra.ports.services import Blobs
from infra.settings.settings import Settings
from infra.spine.postgres.migrate import (
    LOCK,
    TABLE,
    applied_since_base,
    apply,
    migrate,
    migrations,
    pending_migrations,
)
from infra.spine.postgres.pool import administering
from schemas.errors import Conflict, CorruptData, InvalidConfig

EMPTY = 'delete from "{table}"'
GO_ON = """
select setval(pg_get_serial_sequence('{table}', '{column}'), max({column}))
from {table} having count(*) > 0
"""
"""Makes the sequence of an identity column continue after the restored values."""

IDENTITIES = """
select table_name, column_name from information_schema.columns
where table_schema = current_schema() and is_identity = 'YES'
"""


async def restore(url: str, store: Blobs, settings: Settings, source: Path) -> Contents:
    """Restore the backup in `source` into the database at `url` and into `store`, and return its
    contents. Raises InvalidConfig (not a backup, or of a newer version), CorruptData (its bytes are
    damaged; the database is unchanged), Conflict (the database or the blobs are not empty),
    TransientError."""
    contents = contents_of(source)
    _require_known_schema(contents)
    for table in contents.tables:
        _verify(source / TABLES / table.name, table.sha256)
    async with administering(url) as admin:
        if not await admin.fetchval("select to_regclass('migrations') is null"):
            raise Conflict(
                "the database is not empty; name an empty one in HEADRACE_DATABASE_URL, because a "
                "restore replaces nothing"
            )
        await adopt(store, contents.installation)
        for blob in contents.blobs:
            await _put(store, blob, source / BLOBS / blob.key)
        async with admin.transaction():
            await admin.execute("select pg_advisory_xact_lock($1)", LOCK)
            await _fill(admin, contents, source)
            await admin.execute("update effects set worker = null where worker is not null")
        await migrate(url)
        await admin.execute(
            "update installation set blobs = $1, place = $2, since = clock_timestamp()",
            settings.blobs,
            whereabouts(settings),
        )
    return contents


def _require_known_schema(contents: Contents) -> None:
    """Raise InvalidConfig unless this version of Headrace knows the schema of the backup."""
    try:
        pending_migrations(contents.migrations)
    except InvalidConfig as error:
        raise InvalidConfig(f"the backup cannot be restored here: {error.message}") from error


def _verify(path: Path, sha256: str) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise CorruptData(
            f"file {path} of the backup cannot be read ({error.strerror}); use another backup"
        ) from error
    if found != sha256:
        raise CorruptData(
            f"file {path} does not hold the bytes that were backed up; use another backup"
        )


async def _put(store: Blobs, blob: Blob, path: Path) -> None:
    """Write a blob, unless it is already there with the right content."""
    uri = await store.exists(blob.key)
    if uri is not None and await _hash(store, uri) == blob.sha256:
        return
    _verify(path, blob.sha256)
    await store.put_file(blob.key, path)


async def _hash(store: Blobs, uri: str) -> str:
    digest = hashlib.sha256()
    async for piece in store.chunks(uri):
        digest.update(piece)
    return digest.hexdigest()


async def _fill(admin: Any, contents: Contents, source: Path) -> None:
    """Create the schema that the backup had, and copy its rows."""
    await admin.execute(TABLE)
    applied = applied_since_base(contents.migrations)
    for migration in migrations():
        if migration.name in applied:
            await apply(admin, migration)
    for table in contents.tables:
        await _copy(admin, table, source / TABLES / table.name)
    for row in await admin.fetch(IDENTITIES):
        await admin.execute(GO_ON.format(table=row["table_name"], column=row["column_name"]))


async def _copy(admin: Any, table: Table, path: Path) -> None:
    """Copy rows as they were, in place of those that a migration made. No trigger acts on them, because
    what it would do was backed up too."""
    await admin.execute(f'alter table "{table.name}" disable trigger user')
    await admin.execute(EMPTY.format(table=table.name))
    tag = await admin.copy_to_table(table.name, columns=table.columns, source=path)
    await admin.execute(f'alter table "{table.name}" enable trigger user')
    if int(tag.split()[1]) != table.num_rows:
        raise CorruptData(
            f"file {path} has {tag.split()[1]} rows and not the {table.num_rows} that were backed up; "
            "use another backup"
        )
