"""A backup: the database as of one moment, and every blob that it names, in a directory.

The platform keeps running while it is taken. One transaction's snapshot is copied, table by table, as
text that any PostgreSQL reads, and then the blobs that its events name. None of them disappears
meanwhile, because nothing is deleted during a backup (`infra/blobs/installed.py`). Blobs that are
written meanwhile belong to a later moment and are left out. `backup.json` is written last, so a
directory without it is not a backup. `infra/operations/maintenance/restore.py` reads it.
"""

import hashlib
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.blobs.installation import belong
from infra.blobs.installed import KEEPING, InstalledBlobs, install
from infra.blobs.references import NamedArtifact, named_artifacts
from infra.ports.services import Blobs
from infra.settings.settings import Settings
from infra.spine.postgres.migrate import pending_migrations
from infra.spine.postgres.pool import administering, connect
from schemas.errors import Conflict, InvalidConfig, NotFound

CONTENTS = "backup.json"
TABLES = "tables"
BLOBS = "blobs"

ELSEWHERE = (
    "migrations",
    "workers",
    "worker_doors",
    "chat_grants",
    "serving_doors",
    "serving_grants",
    "browser_sessions",
    "sign_in_codes",
)
"""Tables that are not copied: a restore applies the migrations itself, and leases do not survive it."""

LISTED = """
select c.table_name, array_agg(c.column_name::text order by c.ordinal_position) as columns
from information_schema.columns c join pg_tables t
    on t.schemaname = c.table_schema and t.tablename = c.table_name
where c.table_schema = current_schema() and c.is_generated = 'NEVER' and c.table_name <> all ($1)
group by c.table_name order by c.table_name
"""


class Table(BaseModel):
    """A table of the backup. Its rows are in the file `tables/<name>`."""

    model_config = ConfigDict(frozen=True)
    name: str
    columns: tuple[str, ...]
    num_rows: int
    sha256: str


class Blob(BaseModel):
    """A blob of the backup. Its bytes are in the file `blobs/<key>`."""

    model_config = ConfigDict(frozen=True)
    key: str
    size: int
    sha256: str


class Contents(BaseModel):
    """The content of a backup. `faults` lists the artifacts that the log needs and that could not be
    copied as they were recorded."""

    model_config = ConfigDict(frozen=True)
    format: Literal[1] = 1
    installation: str
    taken_at: datetime
    migrations: dict[str, str]
    tables: tuple[Table, ...]
    blobs: tuple[Blob, ...]
    faults: tuple[str, ...] = ()

    @property
    def num_events(self) -> int:
        return next(table.num_rows for table in self.tables if table.name == "events")

    @property
    def size(self) -> int:
        """The size of all blobs together, in bytes."""
        return sum(blob.size for blob in self.blobs)


async def back_up(url: str, store: Blobs, settings: Settings, target: Path) -> Contents:
    """Copy the database at `url` and the blobs in `store` into `target`, a directory that is empty or
    does not exist yet. Raises Conflict (the directory, or blobs of another installation), InvalidConfig
    (another schema), TransientError."""
    _make(target)
    async with administering(url) as admin, connect(url, size=1) as database:
        migrations = await _migrations(admin)
        owner = await belong(database, store, settings)
        blobs = await install(store, database)
        await admin.execute("select pg_advisory_lock($1)", KEEPING)
        taken_at = datetime.now(UTC)
        async with admin.transaction(isolation="repeatable_read", readonly=True):
            tables = [
                await _copy_table(admin, row["table_name"], row["columns"], target)
                for row in await admin.fetch(LISTED, ELSEWHERE)
            ]
            wanted = await _artifacts_to_copy(admin)
        copied, faults = await _copy_blobs(wanted, blobs, target)
    contents = Contents(
        installation=owner,
        taken_at=taken_at,
        migrations=migrations,
        tables=tuple(tables),
        blobs=tuple(copied),
        faults=tuple(faults),
    )
    _write(target / CONTENTS, contents.model_dump_json(indent=1).encode())
    return contents


def contents_of(source: Path) -> Contents:
    """The contents of the backup in a directory. Raises InvalidConfig when it holds none."""
    try:
        return Contents.model_validate_json((source / CONTENTS).read_bytes())
    except OSError as error:
        raise InvalidConfig(
            f"{source} does not hold a finished backup: {CONTENTS} cannot be read ({error.strerror}); "
            "name the directory of one"
        ) from error
    except ValidationError as error:
        raise InvalidConfig(
            f"{source / CONTENTS} does not have the format of this version of Headrace ({error}); "
            "restore it with the version that wrote it"
        ) from error


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(target: Path) -> None:
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = any(target.iterdir())
        for name in () if taken else (TABLES, BLOBS):
            (target / name).mkdir()
    except OSError as error:
        raise InvalidConfig(
            f"directory {target} cannot be written ({error.strerror}); name another one"
        ) from error
    if taken:
        raise Conflict(
            f"directory {target} is not empty; name one that is empty or does not exist yet"
        )


async def _migrations(admin: Any) -> dict[str, str]:
    """Name -> checksum of the applied migrations. Raises InvalidConfig unless they are exactly those of
    this version of Headrace."""
    empty = await admin.fetchval("select to_regclass('migrations') is null")
    rows = [] if empty else await admin.fetch("select name, checksum from migrations order by name")
    applied = {row["name"]: row["checksum"] for row in rows}
    if pending_migrations(applied):
        raise InvalidConfig(
            "the database does not have the schema of this version; run `headrace up` or "
            "`python -m infra.spine.postgres.migrate`, and try again"
        )
    return applied


async def _copy_table(admin: Any, name: str, columns: list[str], target: Path) -> Table:
    path = target / TABLES / name
    tag = await admin.copy_from_table(name, columns=columns, output=path)
    _sync(path)
    return Table(
        name=name, columns=tuple(columns), num_rows=int(tag.split()[1]), sha256=sha256_of(path)
    )


async def _artifacts_to_copy(admin: Any) -> dict[str, NamedArtifact]:
    """The references of the snapshot's events, by URI."""
    wanted: dict[str, NamedArtifact] = {}
    async for found in named_artifacts(admin):
        known = wanted.get(found.ref.uri)
        if known is None or found.needed:
            wanted[found.ref.uri] = found
    return wanted


async def _copy_blobs(
    wanted: dict[str, NamedArtifact], blobs: InstalledBlobs, target: Path
) -> tuple[Iterable[Blob], list[str]]:
    copied: dict[str, Blob] = {}
    faults: list[str] = []
    for found in wanted.values():
        ref = found.ref
        key = await blobs.key(ref.uri)
        if key is None:
            faults.append(
                f"{ref.uri}, which {found.by} names, is not in the blobs of this installation"
            )
            continue
        try:
            size, sha256 = await _fetch(blobs, ref.uri, target / BLOBS / key)
        except NotFound:
            if found.needed:
                faults.append(f"{ref.uri}, which {found.by} names, does not exist any more")
            continue
        if sha256 != ref.sha256:
            faults.append(f"{ref.uri}, which {found.by} names, does not hold the recorded bytes")
        copied[key] = Blob(key=key, size=size, sha256=sha256)
    return copied.values(), faults


async def _fetch(blobs: Blobs, uri: str, path: Path) -> tuple[int, str]:
    """Copy a blob into a file, and return its size and hash. Raises NotFound, and then leaves no
    file."""
    digest = hashlib.sha256()
    pieces = blobs.chunks(uri)
    first = await anext(pieces, b"")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        size = file.write(first)
        digest.update(first)
        async for piece in pieces:
            size += file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    """Write the file completely or not at all."""
    scratch = path.with_suffix(".partial")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
