"""A process that the supervisor keeps alive: started, restarted with growing pauses, stopped.

Each incarnation gets a worker id of its own, so that the supervisor can end its lease the moment it
is dead. A child is in a session of its own (a terminal's Ctrl-C reaches the supervisor only, which
then stops things in order) and is killed by the kernel when the supervisor dies.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from infra.local.death_signal import die_with
from infra.local.forkserver import ForkServer, Process
from infra.local.home import ChildState

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
STEADY_S = 1.0
"""A child that lived this long is not in a crash loop: its next restart is immediate again."""
LARGEST_LOG_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `stop_s` is how long it may take to stop before it is killed; `forked` are the
    arguments for a fork server, where it can be made by one."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    stop_s: float
    forked: Sequence[str] | None = None
    leased: bool = False
    """Whether it holds a lease in the database while it is at work."""


class Child:
    """One supervised process and its incarnations."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        log: Path,
        forks: ForkServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.log = log
        self.starts = 0
        self.worker = ""
        self.note = ""
        self._clock = clock
        self._forks = forks if spec.forked is not None else None
        self._process: Process | None = None
        self._started_at = 0.0
        self._deaths = 0
        self._due_at = 0.0

    @property
    def state(self) -> ChildState:
        pid = self._process.pid if self._process else None
        return ChildState(self.spec.name, pid, self.worker, self.starts, str(self.log), self.note)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def due_in_s(self) -> float | None:
        """Seconds until it is to be started (0: now); None while it runs."""
        return None if self._process else max(0.0, self._due_at - self._clock())

    def waits(self) -> bool:
        """Whether it is better started a little later."""
        return self._process is None and self._forks is not None and self._forks.starting()

    def start(self) -> None:
        self.starts += 1
        self.worker = f"{socket.gethostname()}-{self.starts}-{uuid4().hex[:12]}"
        self._started_at = self._clock()
        make_room(self.log)
        environment = {**self.spec.environment, "HEADRACE_WORKER_ID": self.worker}
        self._process = self._fork(environment) or self._started(environment)

    def _fork(self, environment: Mapping[str, str]) -> Process | None:
        if self._forks is None or self.spec.forked is None:
            return None
        return self._forks.fork(self.spec.forked, environment, self.log)

    def _started(self, environment: Mapping[str, str]) -> Process:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self.spec.argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )

    def reap(self) -> int | None:
        """The exit code of an incarnation that has just been found dead; its restart is planned."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        lived_s = self._clock() - self._started_at
        self._deaths = 0 if lived_s >= STEADY_S else self._deaths + 1
        self._due_at = self._clock() + pause_s(self._deaths)
        return code

    def kill(self) -> None:
        """End it at once; it is found dead, and started again, as if it had died."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Ask it to stop, wait, and kill it when it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self.spec.stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def pause_s(deaths: int) -> float:
    """The pause before a restart after so many early deaths in a row: none after the first."""
    if deaths <= 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(deaths - 2, 16)))


def make_room(log: Path) -> None:
    """Once a log is large, keep what it holds beside it and empty it, while others go on writing: they
    append, so their next line is the first of the empty file. Lines that are written in between are
    lost. Raises nothing: a log that cannot be copied is only emptied. Follows no links, because a
    directory of logs may belong to another user."""
    with contextlib.suppress(OSError), _opened(log, os.O_RDWR) as file:
        if os.fstat(file.fileno()).st_size <= LARGEST_LOG_BYTES:
            return
        try:
            with _opened(former_log(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as kept:
                shutil.copyfileobj(file, kept, 1 << 20)
        except OSError:
            former_log(log).unlink(missing_ok=True)
        os.ftruncate(file.fileno(), 0)


def _opened(path: Path, flags: int) -> BinaryIO:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "rb" if flags == os.O_RDWR else "wb")


def former_log(log: Path) -> Path:
    """Where the lines are that were written before the newest ones."""
    return log.with_suffix(".log.1")
