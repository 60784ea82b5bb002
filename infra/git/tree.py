"""A commit's tree, from the output of `ls-tree` and `cat-file` to a deterministic tar.

Both outputs are read piece by piece. A tree can expand to any size (a repository of some kilobytes can
list 10^10 files), so the listing ends at the first entry beyond a limit, and the cost of an entry is the
length of its own path.
"""

import io
import tarfile
import unicodedata
from dataclasses import dataclass

from schemas.errors import CorruptData, Refused

MOST_FILES = 10_000
"""Files of a commit, and directories likewise: git can list directories that hold nothing."""

MOST_BYTES = 200 << 20
DEEPEST = 32
"""Parts of the longest path: directories, and the file's own name."""

LONGEST_PATH = 1024
LONGEST_NAME = 255
"""Bytes of a path and of one of its parts: what every file system takes."""

LFS = b"version https://git-lfs.github.com/spec/"
HARMLESS = (".gitignore", ".gitkeep", ".gitattributes", ".github")
"""Names that begin with .git and are harmless without a checkout."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a tree: its path, the id of its content, how many bytes that has."""

    path: str
    blob: str
    size: int
    executable: bool


class Listing:
    """Takes `ls-tree -r -t -z -l` of a commit; `entries` are its files."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._rest = b""
        self._names: dict[str, str] = {}
        self._directories = 0
        self._bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take a piece of the listing. Raises Refused, which names the path that is not acceptable or
        the limit that is exceeded."""
        *lines, self._rest = (self._rest + chunk).split(b"\0")
        for line in lines:
            self._add(line)
        if len(self._rest) > 2 * LONGEST_PATH:
            self._add(self._rest)

    def _add(self, line: bytes) -> None:
        head, _, raw = line.partition(b"\t")
        mode, kind, blob, size = head.decode().split()
        path = _checked_path(raw, mode=mode, kind=kind)
        name = unicodedata.normalize("NFC", path).casefold()
        if self._names.setdefault(name, path) != path:
            raise Refused(
                f"{path!r} and {self._names[name]!r} are one name on some systems; rename one"
            )
        if kind == "tree":
            self._directories += 1
        else:
            self.entries.append(Entry(path, blob, int(size), mode == "100755"))
            self._bytes += int(size)
        if max(len(self.entries), self._directories) > MOST_FILES or self._bytes > MOST_BYTES:
            raise Refused(
                f"the commit holds more than {MOST_FILES} files or directories, or more than "
                f"{MOST_BYTES >> 20} MiB; keep data and weights out of the repository"
            )


def _checked_path(raw: bytes, *, mode: str, kind: str) -> str:
    """The path of an entry. Raises Refused when it cannot be materialised safely everywhere."""
    if len(raw) > LONGEST_PATH:
        raise Refused(
            f"{_short(repr(raw))} is a path of more than {LONGEST_PATH} bytes; shorten it"
        )
    try:
        path = raw.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{_short(repr(raw))} is not a UTF-8 file name; rename it") from error
    parts = path.split("/")
    if len(parts) > DEEPEST:
        raise Refused(
            f"{_short(path)!r} is {len(parts)} levels deep, more than {DEEPEST}; move it up"
        )
    if any(len(part.encode()) > LONGEST_NAME for part in parts):
        raise Refused(
            f"{_short(path)!r} has a name of more than {LONGEST_NAME} bytes, which no disk holds; "
            "shorten it"
        )
    if mode == "120000":
        raise Refused(f"{path} is a symbolic link; commit the file itself")
    if kind != "tree" and (kind != "blob" or mode not in ("100644", "100755")):
        raise Refused(f"{path} is a submodule or not a plain file; commit the files themselves")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise Refused(f"{path!r} is not a path inside the repository")
    if any(part.lower().startswith(".git") and part not in HARMLESS for part in parts):
        raise Refused(f"{path}: a name that begins with .git is not allowed; remove it")
    return path


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


class Archive:
    """Takes `cat-file --batch` of a listing's files and makes a tar: same commit, same bytes."""

    def __init__(self, entries: list[Entry]) -> None:
        self._waiting = iter(entries)
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed by `close`
        self._rest = bytearray()
        self._entry = next(self._waiting, None)
        self._has_head = False

    def feed(self, chunk: bytes) -> None:
        """Take a piece. Raises Refused for a Git LFS pointer, CorruptData for what was not asked for."""
        self._rest += chunk
        while self._entry is not None and self._step(self._entry):
            pass

    def _step(self, entry: Entry) -> bool:
        """Whether the rest held a whole head, or a whole content; it is taken."""
        if not self._has_head:
            end = self._rest.find(b"\n")
            if end < 0:
                return False
            if bytes(self._rest[:end]).decode() != f"{entry.blob} blob {entry.size}":
                raise CorruptData(f"git does not have the content of {entry.path}")
            del self._rest[: end + 1]
            self._has_head = True
        if len(self._rest) < entry.size + 1:
            return False
        self._write(entry, bytes(self._rest[: entry.size]))
        del self._rest[: entry.size + 1]
        self._entry, self._has_head = next(self._waiting, None), False
        return True

    def _write(self, entry: Entry, data: bytes) -> None:
        if data.startswith(LFS):
            raise Refused(f"{entry.path} is a Git LFS pointer; commit the file itself")
        member = tarfile.TarInfo(entry.path)
        member.size = entry.size
        member.mode = 0o755 if entry.executable else 0o644
        self._tar.addfile(member, io.BytesIO(data))

    def close(self) -> bytes:
        """The tar. Raises CorruptData when files are missing."""
        if self._entry is not None:
            raise CorruptData(f"git did not give the content of {self._entry.path}")
        self._tar.close()
        return self._buffer.getvalue()
