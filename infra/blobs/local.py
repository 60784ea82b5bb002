"""Blobs in a local directory: durable, never torn, create-only on request.

A blob is written to a scratch file, synced, and published under its key in one step. A crash leaves
either nothing or the whole blob. A scratch file that it leaves is removed at a start a day later.

Equal content of several runs, such as the weights that they begin with, is stored once. Each content
has a name of its own in `.shared`, and every run's blob is a hard link to it. So a deletion takes a name
and never the bytes of another run, and the bytes go with the last name. Where a file system has no hard
links, each blob has its own bytes.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from infra.blobs.streamed import FileWriter, blocks_of
from infra.ports.services import BlobExists, BlobInfo, StreamedBlob
from infra.settings.blob_keys import check_key, check_prefix, is_key
from schemas.errors import InvalidConfig, NotFound, StoreAway, TransientError

CHUNK_BYTES = 1 << 20
RECEIVED_BYTES = 512 << 10
"""How much of a body is gathered for a write. More does not fit the caches of a core, and less costs
more changes between threads."""

SHARED_BYTES = 64 << 10
"""The smallest content that is shared. Each shared one costs a few system calls."""

LEFTOVER_S = 24 * 3600.0
"""A scratch file that nobody has changed for this long was left by a process that was killed."""


class LocalBlobs:
    """`infra.ports.services.Blobs` below one directory. Raises InvalidConfig when it cannot be made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._scratch = root / ".scratch"
        self._shared = root / ".shared"
        try:
            for directory in (self._scratch, self._shared):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidConfig(
                f"blob directory {root} cannot be created ({error.strerror}); name a directory that you "
                "may write in HEADRACE_BLOBS"
            ) from error
        with contextlib.suppress(OSError):  # they only take space
            self._remove_leftovers()

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        path = self._path(key)
        is_shared = path.name == sha256 and len(data) >= SHARED_BYTES and not create_only
        if is_shared and await asyncio.to_thread(self._link_shared, path, data):
            return path.as_uri()
        await asyncio.to_thread(self._write, path, data, create_only)
        if is_shared:
            await asyncio.to_thread(self._share, path)
        return path.as_uri()

    async def put_file(self, key: str, path: Path) -> str:
        target = self._path(key)
        await asyncio.to_thread(self._copy, target, path)
        return target.as_uri()

    async def get_blob(self, uri: str) -> bytes:
        path = self._path_of(uri)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError as error:
            raise NotFound(f"no blob at {uri}") from error

    async def put_stream(self, key: str, body: AsyncIterator[bytes]) -> StreamedBlob:
        path = self._path(key)
        writer = await asyncio.to_thread(self._open_writer)
        try:
            async for block in blocks_of(body, RECEIVED_BYTES):
                await self._await_write(writer.write(block))
            await self._await_write(writer.finish())
            publishing = asyncio.to_thread(self._publish, writer.path, path, create_only=False)
            await self._await_write(publishing)
        finally:
            await asyncio.shield(writer.discard())
        return StreamedBlob(path.as_uri(), writer.size, writer.sha256)

    async def chunks(
        self, uri: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        path = self._path_of(uri)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError as error:
            raise NotFound(f"no blob at {uri}") from error
        with file:
            file.seek(start)
            left = sys.maxsize if stop is None else stop - start
            while piece := await asyncio.to_thread(file.read, min(CHUNK_BYTES, left)):
                left -= len(piece)
                yield piece

    async def delete(self, uri: str) -> None:
        path = self._path_of(uri)
        try:
            await asyncio.to_thread(self._unlink, path)
        except OSError as error:
            raise TransientError(f"{path} cannot be deleted ({error.strerror})") from error

    async def file(self, uri: str) -> Path | None:
        return self._path_of(uri) if uri.startswith("file://") else None

    async def exists(self, key: str) -> str | None:
        path = self._path(key)
        return path.as_uri() if await asyncio.to_thread(path.exists) else None

    async def keys(self, prefix: str) -> Sequence[BlobInfo]:
        check_prefix(prefix)
        return await asyncio.to_thread(self._list, prefix)

    def _list(self, prefix: str) -> list[BlobInfo]:
        found = []
        for directory, folders, names in os.walk(self._root / prefix.rpartition("/")[0]):
            if Path(directory) == self._root:
                folders[:] = set(folders) - {self._scratch.name, self._shared.name}
            keys = [(Path(directory) / name).relative_to(self._root).as_posix() for name in names]
            found += [self._info(key) for key in keys if key.startswith(prefix) and is_key(key)]
        return sorted((info for info in found if info), key=lambda info: info.key)

    def _info(self, key: str) -> BlobInfo | None:
        """None when the blob was deleted since its name was read."""
        path = self._root / key
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        return BlobInfo(
            key, path.as_uri(), stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC)
        )

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    def _path_of(self, uri: str) -> Path:
        """The path of a URI below our directory. Raises NotFound for any other."""
        path = Path(unquote(urlsplit(uri).path))
        if not uri.startswith("file://") or not path.resolve().is_relative_to(self._root.resolve()):
            raise NotFound(f"{uri} is not in {self._root}")
        return path

    def _write(self, path: Path, data: bytes, create_only: bool) -> None:  # noqa: FBT001 - to_thread
        scratch = self._scratch_file()
        try:
            with scratch.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._publish(scratch, path, create_only=create_only)
        except OSError as error:
            raise self._full(error) from error
        finally:
            scratch.unlink(missing_ok=True)

    def _link_shared(self, path: Path, data: bytes) -> bool:
        """Make `path` a link to the shared content if it is these bytes, and say whether it is. Its time
        of change is now, because a blob that was just written is not an old orphan."""
        shared, scratch = self._shared / path.name, self._scratch / f"{path.name}.{uuid4().hex}"
        try:
            os.link(shared, scratch)
            if not _holds(scratch, data):
                return False
            os.utime(scratch)
            self._publish(scratch, path, create_only=False)
        except OSError:
            return False  # there is none, or no link to it can be made
        finally:
            scratch.unlink(missing_ok=True)
        return True

    def _share(self, path: Path) -> None:
        """Give the content of `path` its shared name. One that holds other bytes is damaged, and is
        replaced."""
        shared, scratch = self._shared / path.name, self._scratch / f"{path.name}.{uuid4().hex}"
        try:
            os.link(path, scratch)
            scratch.replace(shared)
        except OSError:
            return  # no link can be made, or the blob was deleted meanwhile
        finally:
            scratch.unlink(missing_ok=True)
        if not path.exists():
            self._forget_shared(shared, names=1)

    def _unlink(self, path: Path) -> None:
        """Delete a blob, and its content if no other one shares it. The shared name goes first, so that
        a crash leaves no bytes without a blob, and again last, because others may delete at the same
        time."""
        shared = self._shared / path.name
        with contextlib.suppress(FileNotFoundError):  # another deletion may take either name
            if path.samefile(shared):
                self._forget_shared(shared, names=2)
        path.unlink(missing_ok=True)
        self._forget_shared(shared, names=1)

    def _forget_shared(self, shared: Path, *, names: int) -> None:
        """Remove a shared name if its content has no more than this many names. A blob that is linked to
        it at this moment keeps the bytes."""
        with contextlib.suppress(FileNotFoundError):
            if shared.stat().st_nlink <= names:
                shared.unlink()

    def _remove_leftovers(self) -> None:
        """Remove the scratch files of processes that were killed. One may be the last link to shared
        content, whose name it begins with."""
        for left in self._scratch.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removes it too
                if time.time() - left.stat().st_ctime >= LEFTOVER_S:
                    left.unlink()
                    self._forget_shared(self._shared / left.name.partition(".")[0], names=1)

    def _copy(self, path: Path, source: Path) -> None:
        scratch = self._scratch_file()
        try:
            with source.open("rb") as reader, scratch.open("wb") as file:
                shutil.copyfileobj(reader, file, CHUNK_BYTES)
                file.flush()
                os.fsync(file.fileno())
            self._publish(scratch, path, create_only=False)
        except OSError as error:
            raise self._full(error) from error
        finally:
            scratch.unlink(missing_ok=True)

    async def _await_write(self, writing: Awaitable[None]) -> None:
        """Wait for a write. Raises TransientError, as `_full`."""
        try:
            await writing
        except OSError as error:
            raise self._full(error) from error

    def _open_writer(self) -> FileWriter:
        return FileWriter(self._scratch_file())

    def _scratch_file(self) -> Path:
        try:
            handle, name = tempfile.mkstemp(dir=self._scratch)
        except OSError as error:
            raise self._full(error) from error
        os.close(handle)
        return Path(name)

    def _publish(self, scratch: Path, path: Path, *, create_only: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if create_only:
            try:
                os.link(scratch, path)
            except FileExistsError as error:
                raise BlobExists(str(path)) from error
        else:
            scratch.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _full(self, error: OSError) -> TransientError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreAway(f"the disk that holds {self._root} is full; free space on it")
        return TransientError(f"a blob cannot be written below {self._root} ({error}); try again")


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file holds exactly these bytes. It is read piece by piece."""
    view, at = memoryview(data), 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            if view[at : at + len(piece)] != piece:
                return False
            at += len(piece)
    return at == len(data)
