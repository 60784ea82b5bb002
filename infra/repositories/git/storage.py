"""The directories of mirrors: a quota of bytes for each workspace, and collection.

Mirrors are only copies, so removing one costs another transfer and nothing else. At any time the mirrors
of a workspace have at most its quota: half of it may be kept, and one transfer may have the other half.
"""

import contextlib
import time
from collections.abc import Container
from pathlib import Path

from infra.repositories.git.process import FILE_BYTES
from infra.repositories.git.refs import ID
from infra.sandbox.written_trees import has_directory, measure_tree, remove_tree
from schemas.errors import Refused

KEPT = 8
"""How many commits are kept per workspace. The most recently used ones stay. The runs of a sweep share
one commit."""

IN_USE_S, MOST_KEPT = 60.0, 64
"""A commit that was used this recently stays too, because many pushes may be examined at the same time.
Never more than MOST_KEPT commits stay."""

LEFT_OVER_S = 3600.0
"""The age at which an unfinished transfer is removed as abandoned."""

UNUSED_S = 30 * 86400.0
"""The age at which the mirrors of a workspace are removed that nobody used since."""

UNMEASURED = 1 << 62
"""The bytes of a mirror that hides what it holds, which is beyond every quota."""

PARTIAL = ".partial"
OF_EARLIER_VERSIONS = ("history.git",)


class MirrorStorage:
    """The mirrors of all workspaces below `root`, one directory for each workspace."""

    def __init__(self, root: Path, *, quota_bytes: int) -> None:
        self._root = root
        self._quota = quota_bytes

    @property
    def most_bytes(self) -> int:
        """The bytes that one transfer may have."""
        return min(FILE_BYTES, self._quota // 2)

    def folder(self, workspace: str) -> Path:
        """Return the directory of a workspace, with room for one transfer."""
        folder = self._root / workspace
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_tree(self._root / f"{workspace}.git")  # of earlier versions
        for name in OF_EARLIER_VERSIONS:
            remove_tree(folder / name)
        self._remove_partials(folder)
        self._make_room(folder)
        return folder

    def check_size(self, mirror: Path) -> None:
        """Raises Refused when a finished transfer has more bytes than one may have."""
        if size_of(mirror) > self.most_bytes:
            raise Refused(too_large(self.most_bytes))

    def collect(self, known: Container[str] | None = None) -> int:
        """Remove unfinished transfers, the mirrors beyond each quota, and those of workspaces that were
        not used for a month, or for an hour if they are not `known`. Returns how many workspaces were
        removed."""
        removed = 0
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            if not has_directory(folder) or folder.name.startswith("key-"):
                continue
            is_known = known is None or folder.name in known
            if time.time() - _last_use(folder) > (UNUSED_S if is_known else LEFT_OVER_S):
                remove_tree(folder)
                removed += 1
                continue
            self._remove_partials(folder)
            self._make_room(folder)
        return removed

    def _remove_partials(self, folder: Path) -> None:
        for path in folder.glob(f"*{PARTIAL}"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFT_OVER_S:
                    remove_tree(path)

    def _make_room(self, folder: Path) -> None:
        """Remove the mirrors that were not used for the longest time, until the rest is within the
        limits."""
        kept = 0
        for count, (used_at, path) in enumerate(_by_use(folder), start=1):
            kept += size_of(path)
            is_in_use = time.time() - used_at <= IN_USE_S
            if count > MOST_KEPT or (count > KEPT and not is_in_use) or kept > self._quota // 2:
                remove_tree(path)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a directory. One that cannot be measured has UNMEASURED."""
    try:
        return measure_tree(folder)[0]
    except Refused:
        return UNMEASURED


def too_large(most: int) -> str:
    """The text that refuses a repository whose transfer has more than `most` bytes."""
    return (
        f"more than {most >> 20} MiB have to be transferred for it; keep data out of the history, or "
        "let the operator raise HEADRACE_GIT_QUOTA_MB"
    )


def _by_use(folder: Path) -> list[tuple[float, Path]]:
    """The mirrors of a workspace with the time of their last use, the newest first."""
    found = []
    for path in folder.glob("*.git"):
        if ID.fullmatch(path.stem):
            with contextlib.suppress(OSError):
                found.append((path.lstat().st_mtime, path))
    return sorted(found, reverse=True)


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return max([folder.lstat().st_mtime, *(used_at for used_at, _ in _by_use(folder))])
    return time.time()
