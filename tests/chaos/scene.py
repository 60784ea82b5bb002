"""The platforms of one mode's trials: one platform or two on the same database, which go on from trial
to trial, and are started again when a trial ended one of them."""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from infra.operations.local.embedded_postgres import place_of
from schemas.errors import TransientError
from tests.chaos.victims import Processes
from tests.kit.platform import Platform, eventually, platform, serving
from tests.stack.components import Components

SettingsFactory = Callable[[], Mapping[str, str]]
"""The settings of a platform in a place of its own."""

INSIDE = Path(__file__).parent / "inside"

SLOW_GIT = """#!/bin/sh
sleep 0.1
PATH=${PATH#*:}
exec git "$@"
"""
"""So that a git process lives long enough to be killed. Its own children are not slowed down."""

STOP_S = 120.0


class Scene:
    """The platforms; the first one is asked."""

    def __init__(self, root: Path, first: Platform, components: Components | None) -> None:
        self.root = root
        self.first = first
        self.second: Platform | None = None
        self.components = components
        self.layout = "one"

    @property
    def platforms(self) -> list[Platform]:
        return [self.first, *([self.second] if self.second else [])]

    @property
    def processes(self) -> Processes:
        return Processes(self.platforms, self.components)

    @property
    def database(self) -> str:
        """The URL of the database that all work on."""
        if given := self.first.environment.get("HEADRACE_DATABASE_URL"):
            return given
        place = place_of(self.first.home)
        assert place is not None
        return place.url

    @contextmanager
    def doubled(self, home: str) -> Iterator[None]:
        """Each consumer runs twice while inside: a second supervisor on the same database."""
        ours = self.first.environment
        settings = {
            "HEADRACE_BLOBS": f"file://{self.first.home}/blobs",
            **{k: v for k, v in ours.items() if k.startswith(("HEADRACE_", "AWS_"))},
            "HEADRACE_DATABASE_URL": self.database,
            "PYTHONPATH": ours["PYTHONPATH"],
        }
        for name in ("HEADRACE_HOME", "HEADRACE_URL"):
            settings.pop(name)
        with platform(self.root / home, environment=settings) as second:
            self.second = second
            yield

    def lay_out(self, layout: str) -> None:
        """Start the platforms again, their consumers spread over processes like this."""
        if layout == self.layout:
            return
        for one in reversed(self.platforms):
            one.process.terminate()
            one.process.wait(STOP_S)
        for one in self.platforms:
            one.environment["HEADRACE_WORKERS"] = layout
            one.process = serving(one.environment)
        self.layout = layout

    def join_again(self) -> None:
        """The members of the second platform leave in order, and join again."""
        assert self.second is not None
        self.second.process.terminate()
        self.second.process.wait(STOP_S)
        self.second.process = serving(self.second.environment)

    def mend(self) -> None:
        """Start again what nobody else keeps alive: supervisors that were killed, and the components of
        a real stack."""
        if self.components is not None:
            if not self.components.postgres.running:
                eventually(self._database_starts, within_s=60, what="the database starts again")
            kafka = self.components.kafka
            if kafka.process is not None and kafka.process.poll() is not None:
                kafka.kill()
                kafka.start()
        for one in self.platforms:
            if one.process.poll() is not None:
                eventually(partial(gone, one), within_s=30, what="what it left is gone")
                one.process = serving(one.environment)

    def _database_starts(self) -> bool | None:
        assert self.components is not None
        try:
            self.components.postgres.start()
        except TransientError:
            return None  # processes of the one before still end
        return True


def gone(started: Platform) -> bool | None:
    """Whether no process of a killed supervisor is left."""
    found = subprocess.run(
        ["pgrep", "-f", str(started.home)], capture_output=True, check=False, text=True
    )
    return True if not found.stdout.strip() else None
