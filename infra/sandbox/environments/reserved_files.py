"""The files of an environment from which its Python starts. No package may write them.

A package that replaces one decides which program runs as the environment's Python. That program would
still be confined, but it would not be the one that the operator chose.
"""

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from infra.sandbox.written_trees import TreeEntry, open_tree, walk_tree
from schemas.errors import Refused

RESERVED = re.compile(
    r"(bin/)?pyvenv\.cfg|bin|lib|lib64|bin/python[0-9.]*[a-z]?(\.exe|\._pth)?|bin/pybuilddir\.txt"
)
"""Places below an environment. Case matters, because the file system's does."""

PLAIN = (stat.S_IFREG, stat.S_IFDIR)
ARCHIVES = "archive-v0"
"""Where uv unpacks wheels in its cache, before it installs them."""

Identity = tuple[int, int, int]
"""The type and number of a file, and the time of its last change, which nobody can set. That time is 0
for a directory, in which files are added."""


def take_reserved(env: Path) -> Mapping[str, Identity]:
    """Return the reserved files and all links of an environment that has no packages yet."""
    with open_tree(env) as top:
        return {
            entry.place: _identity(entry)
            for entry in walk_tree(top)
            if RESERVED.fullmatch(entry.place) or stat.S_ISLNK(entry.told.st_mode)
        }


def check_reserved(folder: Path, reserved: Mapping[str, Identity], what: str) -> None:
    """Raise Refused, with the name of the package, when the environment in `folder` has other reserved
    files, other links, or anything that is not a file."""
    missing = set(reserved)
    with open_tree(folder / "env") as top:
        for entry in walk_tree(top):
            missing.discard(entry.place)
            is_known = reserved.get(entry.place) == _identity(entry)
            is_plain = stat.S_IFMT(entry.told.st_mode) in PLAIN
            if not is_known and (RESERVED.fullmatch(entry.place) or not is_plain):
                raise _refusal(folder, entry.place, what)
    for place in sorted(missing):
        raise _refusal(folder, place, what)


def _identity(entry: TreeEntry) -> Identity:
    told = entry.told
    kind = stat.S_IFMT(told.st_mode)
    return kind, told.st_ino, 0 if kind == stat.S_IFDIR else told.st_ctime_ns


def _refusal(folder: Path, place: str, what: str) -> Refused:
    package = _package_with(folder, place) or what
    return Refused(
        f"{package} writes {place[:80]!r}, from which the environment's Python starts; leave that "
        "package out, or name a version that does not"
    )


def _package_with(folder: Path, place: str) -> str | None:
    """The package whose wheel, as uv unpacked it, holds a file for this place of an environment."""
    ends = (f".data/data/{place}", f".data/scripts/{place.rpartition('/')[2]}")
    names: dict[str, str] = {}
    culprits = set()
    for archive, inside in _unpacked(folder):
        if inside.endswith(".dist-info"):
            names[archive] = inside.removesuffix(".dist-info").replace("-", "==")
        elif inside.endswith(ends) or f"/{inside}".endswith(f"/{place}"):
            culprits.add(archive)
    return next((names[archive] for archive in sorted(culprits) if archive in names), None)


def _unpacked(folder: Path) -> Iterator[tuple[str, str]]:
    """The archives of wheels in uv's cache, each with the places that it holds."""
    try:
        with open_tree(folder / "cache") as cache:
            for entry in walk_tree(cache):
                store, _, rest = entry.place.partition("/")
                archive, _, inside = rest.partition("/")
                if store == ARCHIVES and inside:
                    yield archive, inside
    except OSError:
        return
