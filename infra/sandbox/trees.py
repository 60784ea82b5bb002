"""The snapshots that are unpacked: one directory for each, kept while a process uses it, and then until
there are too many."""

import asyncio
import io
import shutil
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from schemas.errors import CorruptData

KEPT_BYTES = 1 << 30
MOST_TREES = 64
"""How many bytes of snapshots, and how many snapshots, stay unpacked. Those that are in use stay, even
if there are more, and then those that were used last."""


@dataclass(slots=True)
class _Tree:
    directory: Path | None = None
    size: int = 0
    num_holders: int = 0
    unpacking: asyncio.Lock = field(default_factory=asyncio.Lock)


class UnpackedTrees:
    """Directories below `root`, by the hash of their snapshot."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: OrderedDict[str, _Tree] = OrderedDict()

    async def hold(self, sha256: str, fetch: Callable[[], Awaitable[bytes]]) -> Path:
        """Return the directory of a snapshot, which stays until `release`. `fetch` is called when it is
        not unpacked. Raises what `fetch` and `unpack` raise."""
        tree = self._trees.setdefault(sha256, _Tree())
        self._trees.move_to_end(sha256)
        tree.num_holders += 1
        try:
            async with tree.unpacking:
                if tree.directory is None:
                    data = await fetch()
                    tree.directory = await asyncio.to_thread(_unpack_below, self._root, data)
                    tree.size = len(data)
            await self._remove_unused()
        except BaseException:
            self.release(sha256)
            raise
        return tree.directory

    def release(self, sha256: str) -> None:
        """End one use of a snapshot."""
        tree = self._trees[sha256]
        tree.num_holders -= 1
        if not tree.num_holders and tree.directory is None:
            del self._trees[sha256]

    async def _remove_unused(self) -> None:
        num, size = len(self._trees), sum(tree.size for tree in self._trees.values())
        for sha256, tree in tuple(self._trees.items()):
            if num <= MOST_TREES and size <= KEPT_BYTES:
                return
            if not tree.num_holders and tree.directory is not None:
                del self._trees[sha256]
                num, size = num - 1, size - tree.size
                await asyncio.to_thread(shutil.rmtree, tree.directory, ignore_errors=True)


def unpack(snapshot: bytes, directory: Path) -> None:
    """Unpack a snapshot into `directory`, readable by everyone. Raises CorruptData for anything but a
    regular file inside the directory, because Headrace itself makes snapshots and puts nothing else into
    them."""
    directory.chmod(0o755)
    with tarfile.open(fileobj=io.BytesIO(snapshot)) as tar:
        for member in tar:
            target = directory / member.name
            if not member.isfile() or not target.resolve().is_relative_to(directory.resolve()):
                raise CorruptData(f"the snapshot holds {member.name!r}, which is not a plain file")
            source = tar.extractfile(member)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            target.write_bytes(source.read() if source else b"")
            target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _unpack_below(root: Path, snapshot: bytes) -> Path:
    """Unpack a snapshot into a new directory, and return that."""
    directory = Path(tempfile.mkdtemp(dir=root))
    try:
        unpack(snapshot, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory
