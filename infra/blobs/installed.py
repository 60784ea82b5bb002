"""The blobs of an installation: found where they are now, and kept while a backup copies them.

A reference holds the URI under which its bytes were written. The blobs may be elsewhere today (moved to
a larger disk, restored from a backup, mounted under another path on another machine). So the database
remembers every place that they had, and a URI below a former place is looked up below the current one.

Nothing is deleted while a backup is being taken: the backup holds the lock `KEEPING`, and blobs that
should be deleted meanwhile become orphans.
"""

import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from infra.blobs.artifacts import SHARED
from infra.blobs.installation import KEY, identity
from infra.ports.direct_blobs import DirectBlobs
from infra.ports.services import BlobInfo, Blobs, StreamedBlob
from infra.spine.postgres.advisory_lock import exclusively
from infra.spine.postgres.pool import Database
from schemas.errors import CorruptData

logger = logging.getLogger(__name__)

FRESH = timedelta(hours=12)
"""Shared content that is younger is not written again. The collector lets it be for twice as long, and
an attempt that may name it takes half as long at most."""

SHARED_S = 300.0
"""How long a run waits for another one that stores the same content."""

KEEPING = 0x4B454550
"""The advisory lock that keeps blobs ("KEEP"): shared for a deletion, exclusive for a backup."""


MARK_UNNAMED = (
    "insert into discarded_blobs (uri) values ($1)"
    " on conflict (uri) do update set at = clock_timestamp()"
)
MARK_NAMED = "delete from discarded_blobs where uri = any($1)"


async def place_of(blobs: Blobs) -> str:
    """The URI below which a store has its keys. Raises CorruptData."""
    await identity(blobs)
    uri = await blobs.exists(KEY)
    if uri is None or not uri.endswith(f"/{KEY}"):
        raise CorruptData(f"blob {KEY} was removed while it was read; check what else writes there")
    return uri.removesuffix(f"/{KEY}")


async def install(
    blobs: Blobs, database: Database, *, direct: DirectBlobs | None = None
) -> "InstalledBlobs":
    """Wrap these blobs as the installation's, and record in the database where they are. `direct` makes
    URLs of their store, if it has any."""
    here = await place_of(blobs)
    await database.durable.execute(
        "insert into blob_places (root) values ($1) on conflict do nothing", here
    )
    return InstalledBlobs(blobs, database, here=here, direct=direct)


class InstalledBlobs:
    """`infra.ports.services.Blobs` over those of one place, `here`."""

    def __init__(
        self, inner: Blobs, database: Database, *, here: str, direct: DirectBlobs | None = None
    ) -> None:
        self.direct = direct
        self._inner = inner
        self._database = database
        self._here = here
        self._former: tuple[str, ...] = ()

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        if key.startswith(SHARED):
            return await self._put_shared(key, data, sha256)
        return await self._inner.put_blob(key, data, create_only=create_only, sha256=sha256)

    async def _put_shared(self, key: str, data: bytes, sha256: str | None) -> str:
        """Store content that may be there already. If it was written FRESH ago or earlier, it is written
        again, so that it does not count as old before an event names it. Content that is younger needs
        no lock, because the collector lets it be."""
        if (uri := await self._find_fresh(key, len(data))) is not None:
            return uri
        async with self._alone(key):
            if (uri := await self._find_fresh(key, len(data))) is not None:
                return uri
            return await self._inner.put_blob(key, data, sha256=sha256)

    async def delete_shared(self, key: str, *, before: datetime) -> bool:
        """Delete shared content that no event names, unless a run has stored it since `before`. Says
        whether it was deleted."""
        async with self._alone(key):
            found = await self._find_shared(key)
            if found is None or found.modified >= before:
                return False
            await self.delete(found.uri)
        return True

    async def _find_fresh(self, key: str, size: int) -> str | None:
        """The URI of shared content that need not be written again, or None."""
        found = await self._find_shared(key)
        if found is None or found.size != size or datetime.now(UTC) - found.modified >= FRESH:
            return None
        return found.uri

    async def _find_shared(self, key: str) -> BlobInfo | None:
        return next((blob for blob in await self._inner.keys(key) if blob.key == key), None)

    def _alone(self, key: str) -> AbstractAsyncContextManager[object]:
        """Keep others from storing or deleting this content."""
        lock = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], signed=True)
        return exclusively(self._database.url, lock, within_s=SHARED_S)

    async def put_file(self, key: str, path: Path) -> str:
        return await self._inner.put_file(key, path)

    async def get_blob(self, uri: str) -> bytes:
        return await self._inner.get_blob(await self.current_uri(uri))

    async def put_stream(self, key: str, body: AsyncIterator[bytes]) -> StreamedBlob:
        return await self._inner.put_stream(key, body)

    async def chunks(
        self, uri: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        async for piece in self._inner.chunks(await self.current_uri(uri), start=start, stop=stop):
            yield piece

    async def delete(self, uri: str) -> None:
        """Delete a blob, except while a backup is being taken: then it becomes an orphan."""
        found = await self.current_uri(uri)
        async with self._database.lazy.acquire() as connection, connection.transaction():
            if await connection.fetchval("select pg_try_advisory_xact_lock_shared($1)", KEEPING):
                await self._inner.delete(found)
                return
        logger.info("%s is kept because a backup is being taken", uri)

    async def exists(self, key: str) -> str | None:
        return await self._inner.exists(key)

    async def keys(self, prefix: str) -> Sequence[BlobInfo]:
        """All keys but that of the store's id, which the log does not know."""
        return [blob for blob in await self._inner.keys(prefix) if blob.key != KEY]

    async def file(self, uri: str) -> Path | None:
        return await self._inner.file(await self.current_uri(uri))

    async def key(self, uri: str) -> str | None:
        """The key of a URI, or None when it was never one of this installation."""
        found = await self.current_uri(uri)
        return found.removeprefix(f"{self._here}/") if found.startswith(f"{self._here}/") else None

    async def mark_unnamed(self, key: str) -> None:
        """Let the collector delete a blob that is about to be stored, unless an event will name it. So
        nothing is left of a writer that dies in between."""
        uri = f"{self._here}/{key}"
        await self._database.durable.execute(MARK_UNNAMED, uri)

    async def mark_named(self, uris: Sequence[str]) -> None:
        """Forget that these blobs were marked, because an event names them now."""
        await self._database.lazy.execute(MARK_NAMED, list(uris))

    async def places(self) -> set[str]:
        """The current place and each former one. Events may name a blob below any of them."""
        rows = await self._database.lazy.fetch("select root from blob_places")
        return {self._here, *(row["root"] for row in rows)}

    async def current_uri(self, uri: str) -> str:
        """The URI under which the bytes are now. A URI that was never ours is returned unchanged."""
        if uri.startswith(f"{self._here}/"):
            return uri
        if not uri.startswith(tuple(f"{root}/" for root in self._former)):
            rows = await self._database.lazy.fetch("select root from blob_places")
            self._former = tuple(row["root"] for row in rows if row["root"] != self._here)
        fitting = [root for root in self._former if uri.startswith(f"{root}/")]
        if not fitting:
            return uri
        return self._here + uri.removeprefix(max(fitting, key=len))
