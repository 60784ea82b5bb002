"""Turns the output of `ls-tree` and `cat-file` for a commit into a deterministic tar.

Both outputs are read piece by piece. A tree can expand to any size (a repository of some kilobytes can
list 10^10 files). So the listing ends at the first entry beyond a limit, and the cost of an entry is
proportional to the length of its own path.
"""

import io
import tarfile
import unicodedata
from dataclasses import dataclass

from schemas.errors import CorruptData, Refused

MOST_FILES = 10_000
"""The maximum number of files of a commit, and also of its directories, because git can list empty
directories."""

MOST_BYTES = 200 << 20
DEEPEST = 32
"""The maximum number of parts of a path: its directories and the file's own name."""

LONGEST_PATH = 1024
LONGEST_NAME = 255
"""The maximum bytes of a path and of one of its parts. Every file system accepts these lengths."""

LFS = b"version https://git-lfs.github.com/spec/"
HARMLESS = (".gitignore", ".gitkeep", ".gitattributes", ".github")
"""Names that begin with .git and are harmless without a checkout."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a tree: its path, the id of its content, and the content's size in bytes."""

    path: str
    blob: str
    size: int
    executable: bool


class Listing:
    """Parses the output of `ls-tree -r -t -z -l` for a commit. `entries` are its files."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._rest = b""
        self._names: dict[str, str] = {}
        self._directories = 0
        self._bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Parse the next piece of the listing. Raises Refused, which names the path that is not allowed
        or the limit that is exceeded."""
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
    """The path of an entry. Raises Refused when it cannot be written safely on every system."""
    if len(raw) > LONGEST_PATH:
        raise Refused(
            f"{_short(repr(raw))} is a path of more than {LONGEST_PATH} bytes; shorten it"
        )
    try:
        path = raw.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{_short(repr(raw))} is not a UTF-8 file name; rename it") from error
    if not path.isprintable():
        raise Refused(f"{_short(repr(path))} has characters that cannot be shown; rename it")
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
    if any(part.lower().startswith("git~") for part in parts):
        raise Refused(f"{path}: a name that some systems take for .git is not allowed; remove it")
    if any(part.lower().startswith(".git") and part not in HARMLESS for part in parts):
        raise Refused(f"{path}: a name that begins with .git is not allowed; remove it")
    return path


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


class Archive:
    """Makes a tar from the output of `cat-file --batch` for a listing's files. The same commit always
    gives the same bytes."""

    def __init__(self, entries: list[Entry]) -> None:
        self._waiting = iter(entries)
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed by `close`
        self._rest = bytearray()
        self._entry = next(self._waiting, None)
        self._has_head = False

    def feed(self, chunk: bytes) -> None:
        """Add the next piece of the output. Raises Refused for a Git LFS pointer, and CorruptData when
        the output is not the expected content."""
        self._rest += chunk
        while self._entry is not None and self._step(self._entry):
            pass

    def _step(self, entry: Entry) -> bool:
        """Process the next header or content if all of it has arrived. Returns whether it did."""
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
        """Return the finished tar. Raises CorruptData when files are missing."""
        if self._entry is not None:
            raise CorruptData(f"git did not give the content of {self._entry.path}")
        self._tar.close()
        return self._buffer.getvalue()
