"""A process that has imported what a device worker needs, and makes workers by forking.

Importing the numerical libraries costs seconds of CPU, so a worker that died would be missed for as
long; a fork takes milliseconds, and its memory is shared until somebody writes to it. What is forked is
orphaned on purpose: the kernel gives it to the supervisor (a child subreaper, prctl(2)), which watches
it like every other child. Workers do not depend on it: where it is not there they are started plainly.

`consumers/process/fork_server.py` is the other end. Over its standard input, a socket, it says an empty
line once it is ready, reads a JSON object per worker to make (`arguments`, `environment`, `log`), and
answers with its pid, or null.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infra.local.death_signal import die_with

PR_SET_CHILD_SUBREAPER = 36
START_S = 60.0
"""So long a first worker waits for it, rather than importing everything beside it."""
FORK_S = 10.0
REVIVE_S = 3.0

_libc = ctypes.CDLL(None)


class Process(Protocol):
    """What `subprocess.Popen` offers, as far as a child is concerned."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Forked:
    """A child of ours that we did not start."""

    pid: int
    _code: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it) once it has ended."""
        if self._code is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                found, status = self.pid, signal.SIGKILL  # it was gone before it was given to us
            if found:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired when it goes on for longer (seconds)."""
        if (code := self.poll()) is not None:
            return code
        ended = os.pidfd_open(self.pid)
        try:
            select.select([ended], [], [], timeout)
        finally:
            os.close(ended)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The process, kept alive by whoever calls `keep` when it died."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._argv = argv
        self._environment = environment
        self._log = log
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._starts = 0
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def due_in_s(self) -> float | None:
        """Seconds until `keep` would start it again (0: now); None while it runs."""
        if self._process is not None and self._process.poll() is None:
            return None
        if not self._starts:
            return 0.0
        return max(0.0, self._started_at + REVIVE_S - self._clock())

    def keep(self) -> None:
        """Start it when it is due. Its forks are the children of the caller from here on."""
        if self.due_in_s() != 0.0:
            return
        self._close()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                self._argv,
                env=dict(self._environment),
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        ours.settimeout(FORK_S)
        self._channel, self._ready = ours, False
        self._starts += 1
        self._started_at = self._clock()

    def starting(self) -> bool:
        """Whether it is worth waiting for: it is coming up for the first time."""
        if self._starts > 1 or self._process is None or self._process.poll() is not None:
            return False
        return not self._is_ready() and self._clock() < self._started_at + START_S

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Process | None:
        """A new worker; None where it must be started plainly."""
        if self._channel is None or not self._is_ready():
            return None
        asked = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        try:
            self._channel.sendall(json.dumps(asked).encode() + b"\n")
            pid = json.loads(_line(self._channel))
        except (OSError, ValueError):
            self._close()  # it died, or hangs: what it may still answer must not be taken for another
            return None
        return Forked(pid) if isinstance(pid, int) else None

    def stop(self) -> None:
        """End it; its forks go on."""
        self._close()

    def _is_ready(self) -> bool:
        if not self._ready and self._channel is not None:
            self._channel.settimeout(0)
            try:
                self._ready = self._channel.recv(1) == b"\n"
            except OSError:
                pass  # not yet
            finally:
                self._channel.settimeout(FORK_S)
        return self._ready

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel, self._process, self._ready = None, None, False


def _line(channel: socket.socket) -> bytes:
    """An answer. Raises OSError when none comes."""
    said = b""
    while not said.endswith(b"\n"):
        piece = channel.recv(64)
        if not piece:
            raise ConnectionResetError("the fork server is gone")
        said += piece
    return said


def reap_strangers(known: set[int]) -> None:
    """Let go of dead processes that were left to us (whoever dies leaves its children to a subreaper)
    and that nobody here waits for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return  # one of ours died just now: whoever waits for it is told by the next signal
        os.waitpid(found.si_pid, os.WNOHANG)
