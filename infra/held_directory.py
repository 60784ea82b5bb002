"""A temporary directory that is removed at the next start if its process is killed.

Its owner keeps a file in it locked. So the next process that makes one finds those that nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

HELD = "held"


def make_held_directory(prefix: str) -> tuple[Path, int]:
    """Make a directory that only this user can enter, and remove those of the prefix that no process
    holds. Returns it, and a descriptor that keeps it locked until it is closed."""
    for former in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_unheld(former)
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    held = os.open(directory / HELD, flags, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, held


def _remove_unheld(former: Path) -> None:
    """Remove a directory of ours that no process has locked. One without its lock file is being made
    now, or belongs to an earlier version, so it is left alone."""
    try:
        if former.is_symlink() or former.stat().st_uid != os.geteuid():
            return
        descriptor = os.open(former / HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(former, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
