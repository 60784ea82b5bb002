"""A process that the supervisor keeps alive. It is started, restarted with growing pauses, and stopped.

Each incarnation has a worker id of its own, so that the supervisor can end its lease as soon as it is
dead. A child runs in a session of its own, so a terminal's Ctrl-C reaches only the supervisor, which
then stops everything in order. The kernel kills a child when the supervisor dies.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from infra.operations.local.death_signal import die_with
from infra.operations.local.forkserver import ForkServer, Process
from infra.operations.local.home import ChildState

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
STEADY_S = 1.0
"""A child that lived this many seconds is not in a crash loop, so its next restart is immediate
again."""
LARGEST_LOG_BYTES = 64 << 20
AWAY = 75
"""Exit code of a process that cannot work because the database, or something else that it needs, does
not answer (EX_TEMPFAIL of sysexits.h)."""

FIRST_WAIT_S = 1.0
SETTLED_S = 60.0
"""A child that lived this many seconds had found what it needs."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to run. `stop_s` is how many seconds it may take to stop before it is killed. `forked`
    are the arguments for a fork server; None if a fork server cannot start it."""

    name: str
    argv: Sequence[str]
    env_vars: Mapping[str, str]
    stop_s: float
    forked: Sequence[str] | None = None
    leased: bool = False
    """Whether the process holds a lease in the database while it works."""


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
        self._waits = 0

    @property
    def state(self) -> ChildState:
        pid = self._process.pid if self._process else None
        return ChildState(self.spec.name, pid, self.worker, self.starts, str(self.log), self.note)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def due_in_s(self) -> float | None:
        """Seconds until the process should be started (0: now); None while it runs."""
        return None if self._process else max(0.0, self._due_at - self._clock())

    def should_wait(self) -> bool:
        """Whether the start should wait, because the fork server will soon be ready."""
        return self._process is None and self._forks is not None and self._forks.is_starting()

    def start(self) -> None:
        self.starts += 1
        self.worker = f"{socket.gethostname()}-{self.starts}-{uuid4().hex[:12]}"
        self._started_at = self._clock()
        rotate_log(self.log)
        env_vars = {**self.spec.env_vars, "HEADRACE_WORKER_ID": self.worker}
        self._process = self._fork(env_vars) or self._spawn(env_vars)

    def _fork(self, env_vars: Mapping[str, str]) -> Process | None:
        if self._forks is None or self.spec.forked is None:
            return None
        return self._forks.fork(self.spec.forked, env_vars, self.log)

    def _spawn(self, env_vars: Mapping[str, str]) -> Process:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self.spec.argv,
                env=env_vars,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )

    def reap(self) -> int | None:
        """Return the exit code of an incarnation that has just ended, and schedule the restart. Returns
        None while it runs, or if it was reaped before."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        lived_s = self._clock() - self._started_at
        if code == AWAY:
            self._waits = 1 if lived_s >= SETTLED_S else self._waits + 1
            self._due_at = self._clock() + wait_s(self._waits)
            return code
        self._waits = 0
        self._deaths = 0 if lived_s >= STEADY_S else self._deaths + 1
        self._due_at = self._clock() + pause_s(self._deaths)
        return code

    def kill(self) -> None:
        """Kill the process. It is restarted as after any other death."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Send SIGTERM and wait for the end. Kill the process if it has not ended after `stop_s`
        seconds."""
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
    """Seconds to wait before a restart after `deaths` early deaths in a row; 0 after the first."""
    if deaths <= 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(deaths - 2, 16)))


def wait_s(waits: int) -> float:
    """Seconds to wait before a start after `waits` starts in a row that found something away."""
    return float(min(LONGEST_PAUSE_S, FIRST_WAIT_S * 2 ** min(waits - 1, 16)))


def rotate_log(log: Path) -> None:
    """Copy the last LARGEST_LOG_BYTES of a log that is larger to `rotated_log`, and empty it. Its
    writers append, so their next line becomes the first of the empty file. Lines that are written
    during the copy are lost. Raises no OSError: a log that cannot be copied is only emptied. Does not
    follow links, because another user may own the directory."""
    with contextlib.suppress(OSError), _open_log(log, os.O_RDWR) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= LARGEST_LOG_BYTES:
            return
        file.seek(size - LARGEST_LOG_BYTES)
        try:
            with _open_log(rotated_log(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as kept:
                _copy(file, kept, num_bytes=LARGEST_LOG_BYTES)
        except OSError:
            rotated_log(log).unlink(missing_ok=True)
        os.ftruncate(file.fileno(), 0)


def _copy(source: BinaryIO, target: BinaryIO, *, num_bytes: int) -> None:
    """Copy this many bytes, and no more while the source grows."""
    while num_bytes > 0 and (piece := source.read(min(1 << 20, num_bytes))):
        target.write(piece)
        num_bytes -= len(piece)


def _open_log(path: Path, flags: int) -> BinaryIO:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "rb" if flags == os.O_RDWR else "wb")


def rotated_log(log: Path) -> Path:
    """The file that holds the older lines of a log."""
    return log.with_suffix(".log.1")
