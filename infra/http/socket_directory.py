"""A private directory for unix sockets, under the directory for temporary files.

The names of its sockets cannot be guessed, and its group can pass it but not list it. Its owner keeps a
file in it locked, so that the directory of a killed process is found and removed at the next start.
"""

import os
import secrets
import shutil
from pathlib import Path

from infra.held_directory import make_held_directory

PREFIX = "headrace-sockets-"


class SocketDirectory:
    """A directory that only this user can pass, and the users of `group` if it is given. It exists until
    `close` is called."""

    def __init__(self, *, group: int | None = None) -> None:
        self.path, self._held = make_held_directory(PREFIX)
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
