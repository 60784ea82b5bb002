"""Finds a named pipe in a repository that is a directory of this machine.

Git waits without end when it opens one, so a pipe is searched before git starts. The search covers what
git opens to serve a repository: its own files, refs and objects, also where `.git`, `commondir` and
`alternates` lead elsewhere.
"""

import contextlib
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import Refused

INSIDE: dict[str, dict[str, str]] = {
    "repository": {r"refs": "refs", r"objects": "objects", r"info": "files"},
    "refs": {r"(?s).*": "refs"},
    "objects": {r"[0-9a-f]{2}|pack|info": "files"},
    "files": {},
}
"""Kind of a folder -> the names of the folders in it that git reads to serve it -> their kind."""

MOST_ENTRIES = 1_000_000
"""After this many entries, which take some seconds, git is started without a further search."""

MOST_NAMED = 1 << 16
"""How many bytes of a file that names other directories are read."""


def check_pipes(place: Path) -> None:
    """Raises Refused when a repository holds a named pipe where git would open it."""
    pipe = next(_find_pipes(place), None)
    if pipe is not None:
        raise Refused(
            f"{place} cannot be read by git, because {pipe} is a named pipe; remove it, or restore the "
            "file that was there"
        )


def _find_pipes(place: Path) -> Iterator[Path]:
    """The named pipes. Folders that lead to each other are searched once."""
    waiting = deque((top, "repository") for top in _find_git_directories(place))
    seen, left = set[tuple[str, str]](), MOST_ENTRIES
    while waiting and left > 0:
        folder, kind = waiting.popleft()
        where = os.path.realpath(folder)
        if (where, kind) in seen:
            continue
        seen.add((where, kind))
        if kind == "objects":
            others = _read_places(folder / "info" / "alternates", beside=folder)
            waiting.extend((other, kind) for other in others)
            left -= len(others)
        for name, told in _entries(where):
            left -= 1
            if told == stat.S_IFIFO and kind != "objects":
                yield Path(where, name)
            elif told == stat.S_IFDIR:
                inner = (to for names, to in INSIDE[kind].items() if re.fullmatch(names, name))
                waiting.extend((Path(where, name), to) for to in inner)
            if left <= 0:
                return


def _entries(folder: str) -> Iterator[tuple[str, int | None]]:
    """The names in a folder, with the kinds of what they lead to. Of a folder that cannot be read there
    are none, and git tells why."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, _kind_of(entry)


def _find_git_directories(place: Path) -> list[Path]:
    """The directory that git serves for this path, and the one whose files it shares."""
    git = place / ".git"
    if git.is_file():
        found = _read_places(git, beside=place, prefix="gitdir:")
    else:
        found = [git if os.path.lexists(git / "HEAD") else place]
    return found + [one for top in found for one in _read_places(top / "commondir", beside=top)]


def _kind_of(entry: os.DirEntry[str]) -> int | None:
    """The kind of what an entry leads to, or None for a file and for a link to nothing."""
    try:
        if entry.is_dir():
            return stat.S_IFDIR
        return None if entry.is_file() else stat.S_IFMT(entry.stat().st_mode)
    except OSError:
        return None


def _read_places(file: Path, *, beside: Path, prefix: str = "") -> list[Path]:
    """The directories that a file names, one in a line."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        lines = os.read(handle, MOST_NAMED).split(b"\n")
    except OSError:
        return []
    finally:
        os.close(handle)
    named = (os.fsdecode(line).removeprefix(prefix).strip() for line in lines if b"\0" not in line)
    return [beside / name for name in named if name and not name.startswith("#")]
