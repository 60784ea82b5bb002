"""Blobs in memory, bound by the same contract suite as the durable ones."""

import asyncio
from pathlib import Path

from infra.ports import BlobExists
from schemas.errors import NotFound


class MemoryBlobs:
    """`infra.ports.Blobs` in memory."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> str:
        uri = f"memory:///{key}"
        if create_only and uri in self._held:
            raise BlobExists(key)
        self._held[uri] = data
        return uri

    async def put_file(self, key: str, path: Path) -> str:
        return await self.put(key, await asyncio.to_thread(path.read_bytes))

    async def get(self, uri: str) -> bytes:
        if uri not in self._held:
            raise NotFound(f"no blob at {uri}")
        return self._held[uri]

    async def delete(self, uri: str) -> None:
        self._held.pop(uri, None)

    async def exists(self, key: str) -> str | None:
        uri = f"memory:///{key}"
        return uri if uri in self._held else None
