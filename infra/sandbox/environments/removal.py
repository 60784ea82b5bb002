"""Removes environments that were not used for the longest time, when all of them have too many bytes.

A process that uses an environment keeps a file beside it locked, so it is not removed. A removed
environment is built again from its pins.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from infra.sandbox.written_trees import has_directory, measure_tree, read_file, remove_tree
from schemas.errors import Refused

KEY_LENGTH = 64
PYTHONS = "pythons"
"""The folder of copied Pythons."""

LONGEST_CONFIG = 64 << 10
"""The most bytes of a `pyvenv.cfg` that is read."""

LEFT_OVER_S = 86400.0
"""The age at which a working directory is abandoned. No command runs for so long."""


class EnvironmentUse:
    """The use of an environment by this process, until it is closed."""

    def __init__(self, place: Path) -> None:
        used = place.with_suffix(".used")
        # A file, so that it is closed too when the caller was cancelled and nobody gets this object.
        self._held = os.fdopen(os.open(used, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._held, fcntl.LOCK_SH)

    def touch(self) -> None:
        """Note that the environment is used now."""
        os.utime(self._held.fileno())

    def close(self) -> None:
        """End the use."""
        self._held.close()


def remove_partials(directory: Path, key: str) -> None:
    """Remove what killed builders of an environment left behind. The caller has its lock."""
    for left in directory.glob(f"{key}-*.partial"):
        remove_tree(left)


def make_room(directory: Path, most_bytes: int, *, keep: str | None = None) -> int:
    """Remove the environments that were not used for the longest time, until the others have at most
    this many bytes. Those in use and `keep` stay. What killed processes left behind is removed too.
    Returns how many environments were removed."""
    _remove_left_over(directory)
    _remove_unused_copies(directory)
    sizes = {place: _size_of(place, most_bytes) for place in _environments(directory)}
    total, removed = sum(sizes.values()), 0
    for place in sorted(sizes, key=_last_use):
        if total <= most_bytes:
            break
        if place.name != keep and _remove_unused(place):
            total -= sizes[place]
            removed += 1
    return removed


def _remove_left_over(directory: Path) -> None:
    """Remove half-removed environments, and working directories that nobody can be using any more."""
    for left in directory.glob("*.removed"):
        remove_tree(left)
    for left in directory.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > LEFT_OVER_S:
                remove_tree(left)


def _remove_unused_copies(directory: Path) -> None:
    """Remove copies of Python and of uv that no environment needs and that were not used for a day."""
    needed = {home for place in _environments(directory) if (home := _home_of(place)) is not None}
    copies = [*(directory / PYTHONS).glob("cpython-*"), *directory.glob("uv-*")]
    for copy in copies:
        with contextlib.suppress(OSError):
            if copy in needed or time.time() - copy.lstat().st_mtime <= LEFT_OVER_S:
                continue
            remove_tree(copy)


def _home_of(environment: Path) -> Path | None:
    """The installation of Python that an environment was made from."""
    with contextlib.suppress(OSError, Refused):
        told = read_file(environment, "pyvenv.cfg", most=LONGEST_CONFIG) or b""
        for line in told.decode(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "home":
                return Path(value.strip()).parent
    return None


def _size_of(place: Path, most_bytes: int) -> int:
    """The bytes of an environment. One that cannot be measured, because it was made before that was
    checked, has too many."""
    try:
        return measure_tree(place)[0]
    except Refused:
        return most_bytes + 1


def _environments(directory: Path) -> list[Path]:
    return [path for path in directory.glob("?" * KEY_LENGTH) if has_directory(path)]


def _last_use(place: Path) -> float:
    with contextlib.suppress(OSError):
        return place.with_suffix(".used").stat().st_mtime
    return 0.0


def _remove_unused(place: Path) -> bool:
    used = place.with_suffix(".used")
    descriptor = os.open(used, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        doomed = place.with_suffix(".removed")
        place.rename(doomed)
        remove_tree(doomed)
    except OSError:  # in use, or another process removes it
        return False
    finally:
        os.close(descriptor)
    return True
