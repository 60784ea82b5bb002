"""Archives: an ended run's history as one file in the blob store, and back.

`pack` writes the file and reads it back; only then may `remove` take the history out of the database,
in one transaction that leaves a notice (migration 0016). A crash before it leaves both, and a file
that is collected like every blob that nothing names; a crash after it leaves the archive. `restore`
puts the blobs first, then everything else in one transaction. Two of either at once: one commits, the
other finds that nothing is left to do.
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

from infra.blobs.artifacts import ROW
from infra.blobs.garbage import COLLECTING
from infra.blobs.installed import InstalledBlobs
from infra.blobs.references import NamedArtifact, named_in
from infra.failpoints import hit
from infra.maintenance.archive_file import BLOBS, EVENTS, ROWS, ArchiveWriter, Member, members
from infra.ports.event_log import Cursor
from infra.postgres.advisory_lock import exclusively
from infra.postgres.codec import edge_ids, encode
from infra.postgres.errors import translating_errors
from infra.postgres.notify import News, Notifier
from infra.postgres.pool import Database, open_session
from infra.postgres.queries import queries
from schemas.errors import Conflict, CorruptData, NotFound, TransientError
from schemas.events import DatasetDeleted, Event, RunArchived, RunDeleted, RunRestored
from schemas.ids import checkpoint_stream, run_stream
from schemas.sampling import ArtifactRef

PAGE = 200
PATIENCE_S = 15.0
"""How long consumers have to read what is about to be removed; watermarks move every two seconds."""
LOOK_EVERY_S = 0.2
LOCK_S = 30.0
"""How long a restore waits for the collector of orphans."""

SQL = queries("event_log")


class Moved(Exception):
    """The history is not what it was: somebody else removed or restored it."""


@dataclass(frozen=True, slots=True)
class PackedArchive:
    """An archive that lies in the blob store, verified."""

    ref: ArtifactRef
    num_events: int
    num_artifacts: int


class Archives:
    """Packs, removes and restores histories. `scratch` is a directory with room for one archive."""

    def __init__(
        self, database: Database, blobs: InstalledBlobs, notifier: Notifier, *, scratch: Path
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._notifier = notifier
        self._scratch = scratch

    async def tidy(self) -> None:
        """Remove what a process that was killed has left in the scratch directory. Only where no other
        process uses it."""
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def pack(self, run: str) -> PackedArchive:
        """Write a run's history into the store; nothing is removed. Raises CorruptData when an artifact
        that it needs is gone or damaged, TransientError, also while a consumer has not read the run's
        events: it could not be removed then."""
        await self._until_read(run)
        async with self._folder() as folder, _session(self._database.url) as connection:
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
        """Take a run's history out of the database, and leave `notice` there: all of it for RunDeleted;
        for RunArchived what the archive holds, `num_events`. Raises Conflict while it cannot be removed,
        Moved when it has other events, TransientError while some consumer has not read them."""
        whole = isinstance(notice, RunDeleted)
        return await self._remove("remove_run", (notice.run, whole, num_events), notice, cause)

    async def remove_dataset(
        self, notice: DatasetDeleted, uris: Sequence[str], *, cause: UUID
    ) -> Cursor:
        """Take a dataset's registration out of the log; its blobs at `uris` are collected later. Raises
        Moved when it is gone already, TransientError."""
        return await self._remove("remove_dataset", (notice.dataset, list(uris)), notice, cause)

    async def restore(self, archive: ArtifactRef, notice: RunRestored, *, cause: UUID) -> Cursor:
        """Bring a history back; `notice` is appended to it. Raises CorruptData when the archive is
        damaged (nothing has changed then), NotFound when it is gone, Moved, TransientError."""
        async with (
            self._folder() as folder,
            exclusively(self._database.url, COLLECTING, within_s=LOCK_S),
        ):
            path = await self._fetch(archive, folder / "archive")
            async for member in _each(path, notice.run):
                if member.kind == BLOBS:
                    await asyncio.to_thread(_copy, member.content, folder / "blob")
                    await self._blobs.put_file(member.name, folder / "blob")
            hit("archive.blobs_back")
            async with _session(self._database.url) as connection:
                return await self._insert(connection, path, notice, cause)

    async def _until_read(self, run: str) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while (
            consumer := await self._database.durable.fetchval(SQL["consumer_behind"], run)
        ) is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise _behind(consumer)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _insert(
        self, connection: Any, path: Path, notice: RunRestored, cause: UUID
    ) -> Cursor:
        async with connection.transaction():
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
                    # In a cluster that the database was moved to, old transaction ids mean nothing.
                    rows = _rows(events, xid="0" if xid == "0" else None)
                    await connection.execute(SQL["insert_events"], *rows)
            first = (notice.run, notice.num_events)
            row = await _call(connection, "restore_run", *first, *_notice_columns(notice, cause))
        hit("archive.restored")
        self._notifier.ping([News.LOG])
        return Cursor(row["r_xid"], row["r_position"])

    async def _remove(
        self, query: str, first: Sequence[object], notice: Event, cause: UUID
    ) -> Cursor:
        """Call a function that removes; wait a while for consumers that have not read so far."""
        arguments = (*first, *_notice_columns(notice, cause))
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        async with _session(self._database.url) as connection:
            while True:
                try:
                    row = await _call(connection, query, *arguments)
                    break
                except TransientError:
                    if asyncio.get_running_loop().time() > deadline:
                        raise
                await asyncio.sleep(LOOK_EVERY_S)
        hit("archive.removed")
        self._notifier.ping([News.LOG])
        return Cursor(row["r_xid"], row["r_position"])

    async def _put(self, run: str, path: Path) -> ArtifactRef:
        """Store an archive under its hash, so that a repeat writes the same bytes, and read it back."""
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
        """A private directory below the scratch directory, gone after."""
        await asyncio.to_thread(self._scratch.mkdir, mode=0o700, parents=True, exist_ok=True)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._scratch))
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _Packing:
    """One archive in the making."""

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
        """The whole history, as of the connection's transaction."""
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
        """Look who the events are about, and which artifacts stay because something that stays names
        them."""
        self.owners = [
            row[0] for row in await connection.fetch(SQL["owners"], run, run_stream(run))
        ]
        for row in await connection.fetch(
            SQL["kept_events"], checkpoint_stream(run), run_stream(run)
        ):
            kept = (named.ref for named in named_in(row, ""))
            self._seen |= {ref.uri for ref in kept if not ref.uri.startswith(ROW)}

    async def _page(self, rows: Sequence[Any]) -> None:
        """The artifacts of a page of events that were not met before, then the events."""
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
        """A blob of the run itself. Others (datasets, snapshots, what another run made) stay: the
        request names them, or their own owner does."""
        key = await self._blobs.key(named.ref.uri)
        if key is None or not key.startswith(tuple(f"runs/{owner}/" for owner in self.owners)):
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
async def _session(url: str) -> AsyncIterator[Any]:
    """A connection as the processes' role whose statements may take their time."""
    connection = await open_session(url, "headrace archive")
    try:
        with translating_errors():
            yield connection
    finally:
        connection.terminate()


async def _call(connection: Any, query: str, *arguments: object) -> Any:
    """Call a function of migration 0016; its refusals become our errors."""
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
        if reason == "OPEN":
            raise Conflict("the run has not ended; stop it first") from error
        raise Conflict(
            "work for it is not finished (a verification, for example); try again after it"
        ) from error


def _notice_columns(notice: Event, cause: UUID) -> tuple[object, ...]:
    [identity] = edge_ids([notice], cause)
    return identity, notice.type, notice.version, encode(notice), cause


def _archived_columns(row: Any) -> Mapping[str, Any]:
    """A row of the log as the archive keeps it; `data` is the very text that was recorded."""
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
    }


def _rows(events: Sequence[Mapping[str, Any]], *, xid: str | None) -> list[list[Any]]:
    """The columns of the query insert_events."""
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
    ]


async def _each(path: Path, run: str) -> AsyncIterator[Member]:
    """The members of an archive; it is unpacked in threads, for much lies between two of them."""
    found = members(path, run)
    while (member := await asyncio.to_thread(next, found, None)) is not None:
        yield member


async def _download(blobs: InstalledBlobs, uri: str, path: Path) -> tuple[str, int]:
    """Copy a blob into a file; returns its hash and size. Raises NotFound."""
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
