"""The platforms that a demo can run on: its own (a home, a free port, a supervisor), or a running
one."""

import os
import subprocess
from pathlib import Path
from typing import Protocol

from infra.operations.local.free_port import free_port
from infra.sandbox.levels.preflight import find_obstacle
from infra.settings.settings import Settings
from producers.cli.client import Client, ServerAddress
from producers.cli.errors import Failure
from producers.cli.launch import launch

STOP_S = 60.0


class DemoTarget(Protocol):
    """The platform that a demo runs on. `prefix` holds the variables that a shell command puts before
    `headrace` to reach it."""

    home: Path
    prefix: str

    def start(self) -> Client: ...
    def stop(self) -> None: ...
    def remove_database(self) -> None: ...


class DemoPlatform:
    """A platform that belongs to the demo. It is started once and stopped once."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.prefix = f"HEADRACE_HOME={self.home} HEADRACE_URL={self.url}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Client:
        """Start everything and return a client. Raises Failure."""
        if (obstacle := find_obstacle()) is not None:
            raise Failure("MISSING", obstacle)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        own = {"HEADRACE_HOME": str(self.home), "HEADRACE_URL": self.url}
        self._process = launch(self.home, {**inherited, **own}, tied=True)
        return Client(ServerAddress(self.url, (self.home / "token").read_text().strip()))

    def stop(self) -> None:
        """Stop everything in order and wait until it has stopped."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def remove_database(self) -> None:
        """Delete the embedded database, which may be outside the home."""
        from infra.operations.local import embedded_postgres as embedded

        embedded.remove(self.home)


class RunningPlatform:
    """A platform that is already running: the one that HEADRACE_URL names. The demo never stops it."""

    def __init__(self) -> None:
        settings = Settings.load(os.environ)
        self.home = settings.home
        self.prefix = f"HEADRACE_HOME={self.home} HEADRACE_URL={settings.url}"

    def start(self) -> Client:
        """Return a client. Raises Failure when no server answers."""
        client = Client()
        if not client.ready():
            raise client.unreachable()
        return client

    def stop(self) -> None:
        return

    def remove_database(self) -> None:
        return
