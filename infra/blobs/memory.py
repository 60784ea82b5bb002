"""A blob store in memory. It passes the same contract suite as `infra/blobs/local.py` and
`infra/blobs/s3/store.py`."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from infra.blobs.local import CHUNK_BYTES
from infra.ports.services import BlobExists, BlobInfo, StreamedBlob
from infra.settings.blob_keys import check_key, check_prefix
from schemas.errors import NotFound


@dataclass(frozen=True, slots=True)
class _Blob:
    data: bytes
    modified: datetime


class MemoryBlobs:
    """`infra.ports.services.Blobs` in memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, _Blob] = {}

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        check_key(key)
        uri = f"memory:///{key}"
        if create_only and uri in self._blobs:
            raise BlobExists(key)
        self._blobs[uri] = _Blob(data, datetime.now(UTC))
        return uri

    async def put_file(self, key: str, path: Path) -> str:
        return await self.put_blob(key, await asyncio.to_thread(path.read_bytes))

    async def get_blob(self, uri: str) -> bytes:
        if uri not in self._blobs:
            raise NotFound(f"no blob at {uri}")
        return self._blobs[uri].data

    async def put_stream(self, key: str, body: AsyncIterator[bytes]) -> StreamedBlob:
        data = b"".join([piece async for piece in body])
        uri = await self.put_blob(key, data)
        return StreamedBlob(uri, len(data), hashlib.sha256(data).hexdigest())

    async def chunks(
        self, uri: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        data = (await self.get_blob(uri))[start:stop]
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    async def delete(self, uri: str) -> None:
        self._blobs.pop(uri, None)

    async def file(self, uri: str) -> Path | None:
        return None

    async def exists(self, key: str) -> str | None:
        uri = f"memory:///{key}"
        return uri if uri in self._blobs else None

    async def keys(self, prefix: str) -> Sequence[BlobInfo]:
        check_prefix(prefix)
        found = (
            BlobInfo(uri.removeprefix("memory:///"), uri, len(blob.data), blob.modified)
            for uri, blob in self._blobs.items()
        )
        return sorted((b for b in found if b.key.startswith(prefix)), key=lambda blob: blob.key)
