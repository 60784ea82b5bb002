"""Finds a Python that can run user code."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python, and the directories with its standard library and its own libraries."""

    path: Path
    files: tuple[Path, ...]


def find_interpreter() -> Interpreter:
    """Return a Python that the user of user code can run: ours if that user can reach it, or else the
    system's.

    Raises InvalidConfig when there is none, for example because ours is in a private directory.
    """
    ours = Path(sys.executable).resolve()
    if os.geteuid() != 0 or is_reachable(ours):
        return Interpreter(ours, _directories(ours))
    for name in ("python3.12", "python3.11", "python3"):
        found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
        if found and is_reachable(Path(found).resolve()):
            return Interpreter(Path(found), ())
    raise InvalidConfig(
        f"user code cannot run {ours}, because a directory above it is private; install a system Python "
        "(Debian: apt-get install python3), or make the directory passable (chmod o+x)"
    )


def _directories(ours: Path) -> tuple[Path, ...]:
    prefixes = (Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve())
    places = (*prefixes, Path(os.__file__).resolve().parent, ours)
    return tuple(path for path in dict.fromkeys(places) if not _is_above_system(path))


def _is_above_system(path: Path) -> bool:
    """Whether a prefix is /usr or something above it, which is never given as a whole."""
    return Path("/usr").is_relative_to(path)


def is_reachable(path: Path) -> bool:
    """Whether every user can pass all directories to this program, and run it."""
    return all(place.stat().st_mode & 0o001 for place in (path, *path.parents))
