"""Stores content as it arrives: gathers small pieces into blocks, and writes one block to a file while
the next one arrives."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

WRITTEN_BYTES = 256 << 10
"""The most bytes of one write. Linux takes two to four times as long for a MiB at once."""

WRITE_SOON = getattr(os, "POSIX_FADV_DONTNEED", None)
"""The advice by which Linux begins to write bytes to the disk; None on other systems."""


async def blocks_of(body: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """Yield the bytes of `body` in blocks of `size` bytes. Only the last one may be smaller."""
    held: list[bytes] = []
    count = 0
    async for piece in body:
        held.append(piece)
        count += len(piece)
        while count >= size:
            whole = b"".join(held)
            yield whole[:size]
            held = [whole[size:]] if count > size else []
            count -= size
    if held:
        yield b"".join(held)


class FileWriter:
    """Writes a new file and its SHA-256 in a thread, one block behind its caller."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self._writing: asyncio.Future[None] | None = None

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    async def write(self, block: bytes) -> None:
        """Write a block, after the one before it was written. Raises OSError."""
        await self._await_block()
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, block))

    async def finish(self) -> None:
        """Wait until everything is written and synced. Raises OSError."""
        await self._await_block()
        await asyncio.to_thread(os.fsync, self._file.fileno())

    async def discard(self) -> None:
        """Close the file and remove it, unless it was renamed."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await asyncio.to_thread(self._discard)

    def _discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    async def _await_block(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _write(self, block: bytes) -> None:
        self._hash.update(block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view[:WRITTEN_BYTES]) :]
        if WRITE_SOON is not None:  # so that the sync at the end waits less
            os.posix_fadvise(self._file.fileno(), self.size, len(block), WRITE_SOON)
        self.size += len(block)
