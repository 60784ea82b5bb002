"""A private directory for unix sockets, under the directory for temporary files.

The names of its sockets cannot be guessed, and its group can pass it but not list it. Its owner keeps a
file in it locked, so that the directory of a killed process is found and removed at the next start.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

PREFIX, HELD = "headrace-sockets-", "held"


class SocketDirectory:
    """A directory that only this user can pass, and the users of `group` if it is given. It exists until
    `close` is called."""

    def __init__(self, *, group: int | None = None) -> None:
        for former in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_unheld(former)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._held = os.open(
            self.path / HELD, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if group is not None:
            os.chown(self.path, -1, group)
            self.path.chmod(0o710)

    def new_path(self) -> Path:
        """A path for another socket. Nothing is there."""
        return self.path / f"{secrets.token_hex(12)}.sock"

    def close(self) -> None:
        """Remove the directory with all its sockets."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def _remove_unheld(former: Path) -> None:
    """Remove a directory of ours that no process has locked. One without its lock file is being made
    now, so it is left alone."""
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
