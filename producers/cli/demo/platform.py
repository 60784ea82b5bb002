"""The demo's own platform: a home below one directory, a free port, one supervisor."""

import os
import subprocess
from pathlib import Path
from typing import Protocol

from infra.local.free_port import free_port
from infra.settings.settings import Settings
from producers.cli.client import Client, ServerAddress
from producers.cli.launch import launch

STOP_S = 60.0


class DemoTarget(Protocol):
    """Where a demo is told. `prefix` is what a shell needs before `headrace` to come back."""

    home: Path
    prefix: str

    def start(self) -> Client: ...
    def stop(self) -> None: ...
    def remove_database(self) -> None: ...


class DemoPlatform:
    """Started and stopped once. `prefix` is what a shell needs before `headrace` to come back."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.prefix = f"HEADRACE_HOME={self.home} HEADRACE_URL={self.url}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Client:
        """Start everything; returns a client of it. Raises Failure."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        mine = {"HEADRACE_HOME": str(self.home), "HEADRACE_URL": self.url}
        self._process = launch(self.home, {**kept, **mine}, tied=True)
        return Client(ServerAddress(self.url, (self.home / "token").read_text().strip()))

    def stop(self) -> None:
        """Stop everything in order, and wait for it."""
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
        """Remove the embedded database, which may live outside of the home."""
        from infra.local import embedded_postgres as embedded

        embedded.remove(self.home)


class RunningPlatform:
    """A platform that runs already: the one that HEADRACE_URL names. It is left as it is."""

    def __init__(self) -> None:
        settings = Settings.load(os.environ)
        self.home = settings.home
        self.prefix = f"HEADRACE_HOME={self.home} HEADRACE_URL={settings.url}"

    def start(self) -> Client:
        """A client of it. Raises Failure when nothing answers."""
        client = Client()
        if not client.ready():
            raise client.unreachable()
        return client

    def stop(self) -> None:
        return

    def remove_database(self) -> None:
        return
