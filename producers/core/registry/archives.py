"""Reads the archive of an artifact: a tar file, compressed with gzip, of plain files.

The archive comes from a stranger. It is read as a stream and nothing of it is written to a disk. What it
may hold is bounded in number, in size and in how far it was compressed.
"""

import gzip
import hashlib
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from schemas.errors import InvalidConfig

MAX_FILES = 10_000
MAX_ENTRIES = 20_000
"""The most files and folders together."""
MAX_UNPACKED = 16 << 30
MAX_RATIO = 200
"""How many times larger than the archive its content may be, beyond SPARE_BYTES. Text of one repeated
line is compressed a thousand times, and real files ten times."""
SPARE_BYTES = 64 << 20

MAX_PATH = 512
"""Bytes of a path."""
MAX_LEVELS = 32
BLOCK_BYTES = 512
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A file of an archive: its path in NFC, its size in bytes and its SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(slots=True)
class ReadArchive:
    """The files of an archive. `kept` has the bytes of the files that were asked for, by path."""

    files: list[ArchivedFile] = field(default_factory=list)
    kept: dict[str, bytes] = field(default_factory=dict)

    @property
    def unpacked_bytes(self) -> int:
        return sum(file.size for file in self.files)


class _Unpacked:
    """The bytes behind a gzip stream, as far as the limits allow. `content_end` is the place after the
    last one that is not zero."""

    def __init__(self, file: BinaryIO, packed: int) -> None:
        self._stream = gzip.GzipFile(fileobj=file, mode="rb")
        self._most = min(MAX_UNPACKED, SPARE_BYTES + MAX_RATIO * packed)
        self._count = 0
        self.content_end = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(PIECE_BYTES if size < 0 else min(size, PIECE_BYTES))
        self._count += len(data)
        if self._count > self._most:
            raise InvalidConfig(
                f"unpacks to more than {self._most} bytes, {MAX_RATIO} times its size; leave out large "
                "files that repeat themselves"
            )
        if content := data.rstrip(b"\0"):
            self.content_end = self._count - len(data) + len(content)
        return data


def read_archive(path: Path, *, keep: frozenset[str] = frozenset(), keep_bytes: int) -> ReadArchive:
    """Read an archive to its end. Of the files whose paths are in `keep` it also returns the first
    `keep_bytes` + 1 bytes. Raises InvalidConfig when it is not an archive of plain files, or larger than
    the limits."""
    found = ReadArchive()
    seen: set[str] = set()
    folded: dict[str, str] = {}
    num_entries = end = 0
    try:
        with path.open("rb") as file:
            stream = _Unpacked(file, path.stat().st_size)
            with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]  # needs only read
                for member in archive:
                    num_entries += 1
                    if num_entries > MAX_ENTRIES:
                        raise InvalidConfig(
                            f"has more than {MAX_ENTRIES} files and folders; leave some out"
                        )
                    end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
                    if (plain := plain_path(member)) is None:
                        continue
                    if plain in seen:
                        raise InvalidConfig(
                            f"has the path {plain!r} twice; remove one of the files"
                        )
                    if len(seen) == MAX_FILES:
                        raise InvalidConfig(f"has more than {MAX_FILES} files; leave some out")
                    seen.add(plain)
                    _refuse_other_case(plain, folded)
                    _read_member(
                        archive, member, plain, found, keep_bytes if plain in keep else None
                    )
            while stream.read(PIECE_BYTES):
                pass
            if (
                stream.content_end > end
            ):  # other programs may read files there that this one did not
                raise InvalidConfig("has a damaged header, or bytes after its end; pack it again")
    except (
        *(tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, UnicodeError),
        RecursionError,  # tarfile calls itself for each header of headers
    ) as error:
        raise InvalidConfig(
            f"cannot be read as tar.gz ({type(error).__name__}); pack it again"
        ) from None
    _refuse_files_as_folders(seen)
    return found


def plain_path(member: tarfile.TarInfo) -> str | None:
    """The path of a file in NFC, relative to the top of the archive; None for a folder. Raises
    InvalidConfig for what is neither, and for a path that leads elsewhere."""
    shown = member.name[:120]
    if not (member.isreg() or member.isdir()) or member.issparse():
        kind = "a link" if member.issym() or member.islnk() else "not a plain file"
        raise InvalidConfig(f"holds {shown!r}, which is {kind}; put in the file itself")
    path = unicodedata.normalize("NFC", member.name)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    is_odd = any(unicodedata.category(letter) in ("Cc", "Cs", "Cf") for letter in path)
    if path.startswith("/") or ".." in parts or "\\" in path or is_odd or ":" in "".join(parts[:1]):
        raise InvalidConfig(
            f"holds the path {shown!r}; use relative paths of printable characters without '..', "
            "'\\' and ':'"
        )
    if len(path.encode()) > MAX_PATH or len(parts) > MAX_LEVELS:
        raise InvalidConfig(
            f"holds the path {shown!r}, which has more than {MAX_PATH} bytes or {MAX_LEVELS} levels; "
            "shorten it"
        )
    if member.isdir():
        return None
    if not parts:
        raise InvalidConfig("holds a file without a name; pack it again")
    return "/".join(parts)


def _read_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: str,
    found: ReadArchive,
    keep_bytes: int | None,
) -> None:
    stream = archive.extractfile(member)
    if stream is None:
        raise InvalidConfig(f"holds {path!r}, which is not a plain file; put in the file itself")
    digest, size, kept = hashlib.sha256(), 0, b""
    for piece in iter(lambda: stream.read(PIECE_BYTES), b""):
        digest.update(piece)
        size += len(piece)
        if keep_bytes is not None and len(kept) <= keep_bytes:
            kept += piece[: keep_bytes + 1 - len(kept)]
    if size != member.size:
        raise InvalidConfig(f"ends within {path!r}; pack it again")
    found.files.append(ArchivedFile(path, size, digest.hexdigest()))
    if keep_bytes is not None:
        found.kept[path] = kept


def _refuse_other_case(path: str, folded: dict[str, str]) -> None:
    """Refuse a path that macOS and Windows take for one that came before: one of the two would be
    unpacked over the other."""
    for part in (path, *_folders(path)):
        before = folded.setdefault(part.casefold(), part)
        if before != part:
            raise InvalidConfig(
                f"holds the paths {before!r} and {part!r}, which some systems take for one; rename one "
                "of them"
            )


def _refuse_files_as_folders(paths: set[str]) -> None:
    for path in paths:
        for above in _folders(path):
            if above in paths:
                raise InvalidConfig(
                    f"holds {above!r} as a file and as a folder; rename one of them"
                )


def _folders(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
