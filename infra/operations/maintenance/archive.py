"""Archives: the history of an ended run, moved into one file in the blob store and back.

`pack` writes the file and reads it back. Only then may `remove` delete the history from the database, in
one transaction that also appends a notice event (`remove_run` in `schema.sql`). A crash before that
transaction leaves the history in the database; the file is then an orphan and is collected like every
blob that no event names. A crash after it leaves the archive. `restore` writes the blobs first, and then
everything else in one transaction. When two processes remove or restore the same history at once, one
of them commits and the other finds that nothing is left to do.
"""

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from infra.blobs.artifacts import SHARED
from infra.blobs.garbage import COLLECTING
from infra.blobs.installed import InstalledBlobs
from infra.blobs.references import NamedArtifact, named_in
from infra.failpoints import hit
from infra.operations.maintenance.archive_file import (
    BLOBS,
    EVENTS,
    ROWS,
    ArchiveWriter,
    Member,
    members,
)
from infra.spine.ports.appender import APPENDER
from infra.spine.ports.artifacts import ROW
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.advisory_lock import Check, exclusively
from infra.spine.postgres.codec import edge_ids, encode
from infra.spine.postgres.errors import translating_errors
from infra.spine.postgres.notify import News, Notifier
from infra.spine.postgres.pool import Database, open_session
from infra.spine.postgres.queries import queries
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Conflict, CorruptData, NotFound, TransientError
from schemas.events import (
    ArtifactWithdrawn,
    DatasetDeleted,
    Event,
    RunArchived,
    RunDeleted,
    RunRestored,
)
from schemas.ids import checkpoint_stream, run_stream

PAGE = 200
PATIENCE_S = 15.0
"""Seconds that a removal waits for consumers to read the events. Watermarks move every two seconds."""
LOOK_EVERY_S = 0.2
LOCK_S = 30.0
"""How long a restore waits for the garbage collector, which must not run at the same time."""

SQL = queries("infra/spine/postgres/sql/event_log.sql")


class Moved(Exception):
    """The history has changed in the meantime: another process removed or restored it."""


@dataclass(frozen=True, slots=True)
class PackedArchive:
    """An archive that was written to the blob store and verified there."""

    ref: ArtifactRef
    num_events: int
    num_artifacts: int


class Archives:
    """Packs, removes and restores histories. `scratch` is a directory with enough free space for one
    archive."""

    def __init__(
        self, database: Database, blobs: InstalledBlobs, notifier: Notifier, *, scratch: Path
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._notifier = notifier
        self._scratch = scratch

    async def tidy(self) -> None:
        """Remove the files that a killed process left in the scratch directory. Call this only when no
        other process uses the directory."""
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def pack(self, run: str) -> PackedArchive:
        """Write a run's history into the blob store and return the archive. Nothing is removed. Raises
        CorruptData when an artifact that the run needs is missing or damaged, and TransientError when a
        service does not answer or a consumer has not read the run's events, because `remove` would then
        fail."""
        await self._until_read(run)
        async with self._folder() as folder, unlimited_session(self._database.url) as connection:
            path = folder / "archive"
            writer = await asyncio.to_thread(ArchiveWriter, path, run)
            packing = _Packing(self._database, self._blobs, writer, folder)
            try:
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    await packing.all_of(connection, run)
                await asyncio.to_thread(writer.close)
            finally:
                writer.abandon()
            ref = await self._put(run, path)
        hit("archive.packed")
        return PackedArchive(ref, writer.events, writer.artifacts)

    async def remove(
        self, notice: RunArchived | RunDeleted, *, cause: UUID, num_events: int = 0
    ) -> Cursor:
        """Delete a run's history from the database, append `notice`, and return the notice's place in
        the log. RunDeleted removes the whole history. RunArchived removes the events that the archive
        holds, `num_events` of them. Raises Conflict when the run has not ended or work for it is
        unfinished, Moved when the history has other events, and TransientError while a consumer has not
        read them."""
        whole = isinstance(notice, RunDeleted)
        return await self._remove("remove_run", (notice.run, whole, num_events), notice, cause)

    async def remove_dataset_version(
        self,
        notice: DatasetDeleted,
        uris: Sequence[str],
        *,
        series: str,
        is_last: bool,
        cause: UUID,
    ) -> Cursor:
        """Delete the registration of a version of a dataset from the log, append `notice`, and return
        the notice's place in the log. Its blobs at `uris` are collected later. With the last version
        the name of the dataset, whose first version is `series`, is free. Raises Moved when the
        registration was already removed, and TransientError."""
        what = (notice.dataset, series, is_last, list(uris))
        return await self._remove("remove_dataset_version", what, notice, cause)

    async def remove_artifact(
        self, notice: ArtifactWithdrawn, uris: Sequence[str], *, cause: UUID
    ) -> Cursor:
        """Delete the publication of a version of an artifact from the log, append `notice`, and return
        the notice's place in the log. Its blobs at `uris` are collected later. Raises Conflict when
        another event names one of them, Moved when the publication was already removed, and
        TransientError."""
        what = (notice.artifact, list(uris))
        return await self._remove("remove_artifact", what, notice, cause)

    async def restore(self, archive: ArtifactRef, notice: RunRestored, *, cause: UUID) -> Cursor:
        """Restore an archived history, append `notice` to it, and return the notice's place in the log.
        Raises CorruptData when the archive is damaged (the log is then unchanged), NotFound when it is
        missing, Moved when the history was restored or removed in the meantime, and TransientError."""
        async with (
            self._folder() as folder,
            exclusively(self._database.url, COLLECTING, within_s=LOCK_S) as check,
        ):
            path = await self._fetch(archive, folder / "archive")
            async for member in _each(path, notice.run):
                if member.kind == BLOBS:
                    await asyncio.to_thread(_copy, member.content, folder / "blob")
                    await self._blobs.put_file(member.name, folder / "blob")
            hit("archive.blobs_back")
            async with unlimited_session(self._database.url) as connection:
                return await self._insert(connection, path, notice, cause, check)

    async def _until_read(self, run: str) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while (
            consumer := await self._database.durable.fetchval(SQL["consumer_behind"], run)
        ) is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise _behind(consumer)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _insert(
        self, connection: Any, path: Path, notice: RunRestored, cause: UUID, check: Check
    ) -> Cursor:
        """Append the history. `check` raises when the lock was lost, because a collector may then have
        deleted the blobs that were put back."""
        async with connection.transaction():
            await connection.execute(SQL["set_actor"], APPENDER.get() or "")
            arguments = (run_stream(notice.run), RunArchived.type)
            xid = await connection.fetchval(SQL["notice"], *arguments)
            if xid is None:
                raise Moved
            async for member in _each(path, notice.run):
                if member.kind == ROWS:
                    await connection.execute(
                        SQL["insert_artifact"],
                        member.name,
                        member.content.read(),
                    )
                elif member.kind == EVENTS:
                    events = await asyncio.to_thread(member.events)
                    # If the database was moved to another cluster, its old transaction ids are invalid.
                    rows = _rows(events, xid="0" if xid == "0" else None)
                    await connection.execute(SQL["insert_events"], *rows)
            first = (notice.run, notice.num_events)
            row = await call_removal(
                connection, "restore_run", *first, *_notice_columns(notice, cause)
            )
            await check()
        hit("archive.restored")
        self._notifier.ping([News.LOG])
        return Cursor(row["r_xid"], row["r_position"])

    async def _remove(
        self, query: str, first: Sequence[object], notice: Event, cause: UUID
    ) -> Cursor:
        """Call an SQL function that removes events. Retries for PATIENCE_S while a consumer has not read
        all of them."""
        arguments = (*first, *_notice_columns(notice, cause))
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        async with unlimited_session(self._database.url) as connection:
            await connection.execute(SQL["set_actor"], APPENDER.get() or "")
            while True:
                try:
                    row = await call_removal(connection, query, *arguments)
                    break
                except TransientError:
                    if asyncio.get_running_loop().time() > deadline:
                        raise
                await asyncio.sleep(LOOK_EVERY_S)
        hit("archive.removed")
        self._notifier.ping([News.LOG])
        return Cursor(row["r_xid"], row["r_position"])

    async def _put(self, run: str, path: Path) -> ArtifactRef:
        """Store an archive under its hash, so that a repetition writes the same bytes to the same key,
        and read it back. Raises CorruptData when the stored bytes differ."""
        sha256, size = await asyncio.to_thread(_digest, path)
        uri = await self._blobs.put_file(f"runs/{run}/archives/{sha256}.tar.gz", path)
        stored = hashlib.sha256()
        async for piece in self._blobs.chunks(uri):
            stored.update(piece)
        if stored.hexdigest() != sha256:
            raise CorruptData(f"{uri} does not hold the archive that was written there; try again")
        return ArtifactRef(uri=uri, sha256=sha256, size=size)

    async def _fetch(self, archive: ArtifactRef, path: Path) -> Path:
        if await _download(self._blobs, archive.uri, path) != (archive.sha256, archive.size):
            raise CorruptData(
                f"{archive.uri} does not hold the archive that was recorded; bring it back from a backup"
            )
        return path

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """A private directory below the scratch directory. It is removed after the block."""
        await asyncio.to_thread(self._scratch.mkdir, mode=0o700, parents=True, exist_ok=True)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._scratch))
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _Packing:
    """The state of one archive while it is being written."""

    def __init__(
        self, database: Database, blobs: InstalledBlobs, writer: ArchiveWriter, folder: Path
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._writer = writer
        self._scratch = folder / "blob"
        self._seen: set[str] = set()
        self.owners: list[str] = []

    async def all_of(self, connection: Any, run: str) -> None:
        """Write the whole history, as the connection's transaction sees it."""
        await self._begin(connection, run)
        page: list[Any] = []
        arguments = (self.owners, checkpoint_stream(run), run_stream(run))
        async for row in connection.cursor(SQL["history"], *arguments, prefetch=PAGE):
            page.append(row)
            if len(page) == PAGE:
                await self._page(page)
                page = []
        await self._page(page)

    async def _begin(self, connection: Any, run: str) -> None:
        """Find the owners of the events (the run and its validations), and the blobs that stay in the
        store because events that are not removed name them."""
        self.owners = [
            row[0] for row in await connection.fetch(SQL["owners"], run, run_stream(run))
        ]
        for row in await connection.fetch(
            SQL["kept_events"], checkpoint_stream(run), run_stream(run)
        ):
            kept = (named.ref for named in named_in(row, ""))
            self._seen |= {ref.uri for ref in kept if not ref.uri.startswith(ROW)}

    async def _page(self, rows: Sequence[Any]) -> None:
        """Write the artifacts that a page of events names and that are not written yet, then the
        events."""
        new: dict[str, NamedArtifact] = {}
        for row in rows:
            for named in named_in(row, f"{row['stream']}/{row['version']}"):
                known = new.get(named.ref.uri)
                if named.ref.uri not in self._seen and (known is None or named.needed):
                    new[named.ref.uri] = named
        await self._small([named for named in new.values() if named.ref.uri.startswith(ROW)])
        for named in new.values():
            if not named.ref.uri.startswith(ROW):
                await self._large(named)
        if rows:
            await asyncio.to_thread(self._writer.page, [_archived_columns(row) for row in rows])

    async def _small(self, wanted: Sequence[NamedArtifact]) -> None:
        hashes = [named.ref.sha256 for named in wanted]
        found = await self._database.durable.fetch(SQL["small_artifacts"], hashes)
        data = {row["sha256"]: row["data"] for row in found}
        for named in wanted:
            content = data.get(named.ref.sha256)
            if content is None and not named.needed:
                continue
            if content is None or hashlib.sha256(content).hexdigest() != named.ref.sha256:
                raise _damage_of(named)
            self._seen.add(named.ref.uri)
            await asyncio.to_thread(self._writer.row, named.ref.sha256, content)

    async def _large(self, named: NamedArtifact) -> None:
        """Write a blob that belongs to the run itself, or is shared with others. Other blobs (datasets,
        snapshots, outputs of another run) stay in the store, because the run's request or their own
        owner names them."""
        key = await self._blobs.key(named.ref.uri)
        own = (SHARED, *(f"runs/{owner}/" for owner in self.owners))
        if key is None or not key.startswith(own):
            self._seen.add(named.ref.uri)
            return
        try:
            sha256, _ = await _download(self._blobs, named.ref.uri, self._scratch)
        except NotFound as error:
            if named.needed:
                raise _damage_of(named) from error
            return
        if sha256 != named.ref.sha256:
            raise _damage_of(named)
        self._seen.add(named.ref.uri)
        await asyncio.to_thread(self._writer.blob, key, self._scratch)


def _behind(consumer: str) -> TransientError:
    return TransientError(
        f"consumer {consumer} has not read all events of it yet; try again when it runs"
    )


def _damage_of(named: NamedArtifact) -> CorruptData:
    return CorruptData(
        f"{named.ref.uri}, which {named.by} names, is gone or damaged, so that the run cannot be "
        "archived; `headrace doctor --deep` shows all damages"
    )


@asynccontextmanager
async def unlimited_session(url: str) -> AsyncIterator[Any]:
    """A connection with the role of the processes and without a limit on the time of a statement."""
    connection = await open_session(url, "headrace archive")
    try:
        with translating_errors():
            yield connection
    finally:
        connection.terminate()


async def call_removal(connection: Any, query: str, *arguments: object) -> Any:
    """Call a function that removes events, and translate its SQL errors. Raises Moved, Conflict,
    TransientError."""
    try:
        return await connection.fetchrow(SQL[query], *arguments)
    except asyncpg.PostgresError as error:
        said = str(error.args[0])
        if error.sqlstate == "HR001":
            raise Moved from error
        if error.sqlstate != "HR004":
            raise
        reason, _, consumer = said.partition(" ")
        if reason == "BEHIND":
            raise _behind(consumer) from error
        if reason == "USED":
            raise Conflict(
                f"it is still used by {consumer}; delete what uses it first, or leave it"
            ) from error
        if reason == "OPEN":
            raise Conflict("the run has not ended; stop it first") from error
        raise Conflict(
            "work for it is not finished (a verification, for example); try again after it"
        ) from error


def _notice_columns(notice: Event, cause: UUID) -> tuple[object, ...]:
    [identity] = edge_ids([notice], cause)
    return identity, notice.type, notice.version, encode(notice), cause


def _archived_columns(row: Any) -> Mapping[str, Any]:
    """A row of the log as the archive stores it. `data` is exactly the text that was recorded."""
    return {
        **{name: row[name] for name in ("position", "xid", "stream", "version", "type")},
        "id": str(row["id"]),
        "schema_version": row["schema_version"],
        "data": row["data"],
        "run_id": row["run_id"],
        "causation": str(row["causation"]) if row["causation"] else None,
        "correlation": str(row["correlation"]),
        "traceparent": row["traceparent"],
        "time": row["time"].isoformat(),
        "actor": row["actor"],
    }


def _rows(events: Sequence[Mapping[str, Any]], *, xid: str | None) -> list[list[Any]]:
    """The events as columns, in the order of the parameters of the query insert_events. `xid` replaces
    the recorded transaction ids; None keeps them."""
    return [
        [event["position"] for event in events],
        [xid or str(event["xid"]) for event in events],
        [UUID(event["id"]) for event in events],
        *([event[name] for event in events] for name in ("stream", "version", "type")),
        *([event[name] for event in events] for name in ("schema_version", "data", "run_id")),
        [UUID(event["causation"]) if event["causation"] else None for event in events],
        [UUID(event["correlation"]) for event in events],
        [event["traceparent"] for event in events],
        [datetime.fromisoformat(event["time"]) for event in events],
        [event.get("actor") for event in events],
    ]


async def _each(path: Path, run: str) -> AsyncIterator[Member]:
    """The members of an archive. It is unpacked in threads, because much data can lie between two
    members."""
    found = members(path, run)
    while (member := await asyncio.to_thread(next, found, None)) is not None:
        yield member


async def _download(blobs: InstalledBlobs, uri: str, path: Path) -> tuple[str, int]:
    """Copy a blob into a file, and return its hash and its size in bytes. Raises NotFound."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        async for piece in blobs.chunks(uri):
            digest.update(piece)
            size += await asyncio.to_thread(file.write, piece)
    return digest.hexdigest(), size


def _copy(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)


def _digest(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
