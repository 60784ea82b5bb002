"""Measures directories of packages, and makes them read-only."""

import contextlib
import os
from pathlib import Path


def measure_tree(folder: Path) -> tuple[int, int]:
    """Return the bytes and the number of the files below a directory. A file with two names counts
    once."""
    size, seen = 0, set()
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                told = (Path(where) / name).lstat()
                if told.st_ino not in seen:
                    seen.add(told.st_ino)
                    size += told.st_size
    return size, len(seen)


def seal_tree(folder: Path) -> None:
    """Make a tree ours and read-only. Links are left as they are, because they may lead elsewhere."""
    is_root = os.geteuid() == 0
    for where, folders, names in os.walk(folder, topdown=False):
        for name in (*names, *folders):
            path = Path(where) / name
            if is_root:
                os.chown(path, 0, 0, follow_symlinks=False)
            if not path.is_symlink():
                runs = path.is_dir() or bool(path.lstat().st_mode & 0o100)
                path.chmod(_mode(is_folder=path.is_dir(), runs=runs))
    if is_root:
        os.chown(folder, 0, 0)
    folder.chmod(0o755)


def _mode(*, is_folder: bool, runs: bool) -> int:
    if is_folder:
        return 0o755
    return 0o555 if runs else 0o444
