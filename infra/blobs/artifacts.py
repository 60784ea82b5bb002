"""Artifacts: content-addressed bytes, small ones as rows of the commit that refers to them.

A row costs no write of its own, and a blob is durable before its reference exists. What this process has
written or read recently stays in memory, so that another consumer in it does not query the database.
"""

import asyncio
import hashlib
from collections import OrderedDict

from infra.blobs.verified_read import Lead, read_verified
from infra.ports.services import Blobs
from infra.spine.ports.artifacts import ROW, SmallArtifact
from infra.spine.ports.event_log import EventStore
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, NotFound

SMALL_BYTES = 64 * 1024
SHARED = "shared/"
"""Keys of content that several runs may name, by its hash."""


def check_content(ref: ArtifactRef, data: bytes | None) -> bytes:
    """Return `data` if it is what `ref` names. Raises NotFound, CorruptData."""
    if data is None:
        raise NotFound(f"artifact {ref.uri} does not exist any more; bring it back from a backup")
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise CorruptData(
            f"{ref.uri} does not hold the recorded {ref.size} bytes with sha256 {ref.sha256}; bring "
            "it back from a backup"
        )
    return data


class ArtifactStore:
    """`infra.ports.services.Artifacts` over rows of the log and Blobs. `stage` gives a writer for one
    effect."""

    def __init__(self, log: EventStore, blobs: Blobs, *, cache_bytes: int = 64 << 20) -> None:
        self._log = log
        self._blobs = blobs
        self._limit = cache_bytes
        self._size = 0
        self._cache: OrderedDict[str, bytes] = OrderedDict()

    def stage(self) -> "StagedArtifacts":
        return StagedArtifacts(self)

    async def put_artifact(
        self,
        data: bytes,
        *,
        run: str,
        blob: bool = False,
        sha256: str | None = None,
        shared: bool = False,
    ) -> ArtifactRef:
        """Store the data as a blob, whatever its size, because only a stage has a commit that takes
        rows."""
        ref = reference(data, uri="", sha256=sha256)
        folder = SHARED if shared else f"runs/{run}/objects/"
        uri = await self._blobs.put_blob(f"{folder}{ref.sha256}", data, sha256=ref.sha256)
        self.remember(ref.sha256, data)
        return ref.model_copy(update={"uri": uri})

    async def get_artifact(self, ref: ArtifactRef, *, cached: bool = True) -> bytes:
        held = self._cache.get(ref.sha256) if cached else None
        if held is not None:
            self._cache.move_to_end(ref.sha256)
            return check_content(ref, held)
        if ref.uri.startswith(ROW):
            data = check_content(ref, await self._log.artifact(ref.sha256))
        else:
            data = check_content(ref, await self._blobs.get_blob(ref.uri))
        self.remember(ref.sha256, data)
        return data

    async def read(self, ref: ArtifactRef, lead: Lead) -> bytes | memoryview:
        """Like `get`, for large content that is read in place. For a file on this machine it returns a
        private copy (a memoryview), which is made and verified in one pass."""
        held = ref.sha256 in self._cache or ref.uri.startswith(ROW)
        path = None if held else await self._blobs.file(ref.uri)
        if path is None:
            return await self.get_artifact(ref)
        return await asyncio.to_thread(read_verified, path, ref, lead)

    async def discard(self, ref: ArtifactRef) -> None:
        dropped = self._cache.pop(ref.sha256, None)
        self._size -= len(dropped or b"")
        # Others may name what is shared, so only the collector deletes it.
        if not ref.uri.startswith(ROW) and not ref.uri.endswith(f"/{SHARED}{ref.sha256}"):
            await self._blobs.delete(ref.uri)

    def remember(self, sha256: str, data: bytes) -> None:
        """Keep bytes in memory while there is room."""
        if sha256 in self._cache or len(data) > self._limit // 4:
            return
        self._cache[sha256] = data
        self._size += len(data)
        while self._size > self._limit:
            _, dropped = self._cache.popitem(last=False)
            self._size -= len(dropped)


class StagedArtifacts:
    """The artifacts that one effect writes. Small ones wait in `pending` for the commit of its
    outcome."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._pending: dict[str, SmallArtifact] = {}

    @property
    def pending(self) -> tuple[SmallArtifact, ...]:
        return tuple(self._pending.values())

    async def put_artifact(
        self,
        data: bytes,
        *,
        run: str,
        blob: bool = False,
        sha256: str | None = None,
        shared: bool = False,
    ) -> ArtifactRef:
        if blob or len(data) > SMALL_BYTES:
            return await self._store.put_artifact(
                data, run=run, blob=True, sha256=sha256, shared=shared
            )
        ref = reference(data, sha256=sha256)
        self._pending[ref.sha256] = SmallArtifact(ref.sha256, data)
        self._store.remember(ref.sha256, data)
        return ref

    async def get_artifact(self, ref: ArtifactRef, *, cached: bool = True) -> bytes:
        staged = self._pending.get(ref.sha256)
        return (
            check_content(ref, staged.data)
            if staged
            else await self._store.get_artifact(ref, cached=cached)
        )

    async def discard(self, ref: ArtifactRef) -> None:
        await self._store.discard(ref)


def reference(data: bytes, *, uri: str | None = None, sha256: str | None = None) -> ArtifactRef:
    """The reference of these bytes. `sha256` is their hash if it is known; without `uri` they are a
    row."""
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    return ArtifactRef(uri=ROW + sha256 if uri is None else uri, sha256=sha256, size=len(data))
