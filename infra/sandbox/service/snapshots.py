"""The snapshots that a service has received: files named by their hash, up to a number of bytes."""

import asyncio
import hashlib
import os
import shutil
from collections import OrderedDict

from infra.sandbox.sandbox import code_directory
from infra.sandbox.service.frames import FrameKind
from infra.sandbox.service.messages import SnapshotRequest
from infra.sandbox.service.peer import Peer
from infra.sandbox.service.streams import StreamReset
from schemas.errors import CorruptData, TransientError

KEPT_BYTES = 1 << 30
LARGEST = 1 << 30
"""The largest snapshot. Git's own limits for a tree are lower."""


class SnapshotCache:
    """Files in a directory of their own, which only this user can read. Those that were not read for the
    longest time are removed first."""

    def __init__(self, *, most_bytes: int = KEPT_BYTES) -> None:
        self._root, self._held = code_directory()
        self._directory = self._root / "snapshots"
        self._directory.mkdir(mode=0o700)
        self._most = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._receiving: dict[str, asyncio.Lock] = {}

    async def get_snapshot(self, sha256: str, size: int, *, peer: Peer) -> bytes:
        """Return the bytes of a snapshot, from a file or else from the client. Raises CorruptData when
        they do not have this hash and size, and TransientError when they do not come."""
        async with self._receiving.setdefault(sha256, asyncio.Lock()):
            data = await asyncio.to_thread(self._read, sha256)
            if data is None:
                data = await _receive(sha256, size, peer)
                await asyncio.to_thread(self._keep, sha256, data)
            return data

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._held)

    def _read(self, sha256: str) -> bytes | None:
        if sha256 not in self._sizes:
            return None
        self._sizes.move_to_end(sha256)
        try:
            data = (self._directory / sha256).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def _keep(self, sha256: str, data: bytes) -> None:
        partial = self._directory / f"{sha256}.partial"
        partial.write_bytes(data)
        partial.replace(self._directory / sha256)
        self._sizes[sha256] = len(data)
        while sum(self._sizes.values()) > self._most:
            oldest, _ = self._sizes.popitem(last=False)
            self._receiving.pop(oldest, None)
            (self._directory / oldest).unlink(missing_ok=True)


async def _receive(sha256: str, size: int, peer: Peer) -> bytes:
    """Receive a snapshot from the client."""
    if size > LARGEST:
        raise CorruptData(f"the snapshot has {size} bytes, more than {LARGEST}")
    payload = SnapshotRequest(sha256=sha256).model_dump_json().encode()
    stream = peer.open_stream(FrameKind.SNAPSHOT, payload)
    data = bytearray()
    try:
        while piece := await stream.receive():
            data += piece
            if len(data) > size:
                break
    except StreamReset as error:
        raise TransientError("the snapshot could not be read") from error
    finally:
        stream.reset()
    if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptData(f"the snapshot {sha256} arrived with other bytes")
    return bytes(data)
