"""The fork server: a process that has imported the libraries of a device worker, and starts workers by
forking.

Importing the numerical libraries takes seconds of CPU time, so starting a worker as a new program takes
as long. A fork takes milliseconds, and shares its memory until it is written to. Forked workers are
orphaned on purpose. The kernel then makes them children of the supervisor (a child subreaper, prctl(2)),
which watches them like every other child. Workers do not need the fork server: without it they are
started as new programs.

`consumers/process/fork_server.py` is the other end. Its standard input is a socket. It sends an empty
line once it is ready, reads one JSON object per worker to start (`arguments`, `env_vars`, `log`), and
answers with the worker's pid, or null.
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

from infra.operations.local.death_signal import die_with

PR_SET_CHILD_SUBREAPER = 36
START_S = 60.0
"""How long a first worker waits for the fork server, instead of importing everything a second time."""
FORK_S = 10.0
REVIVE_S = 3.0

_libc = ctypes.CDLL(None)


class Process(Protocol):
    """The part of `subprocess.Popen` that a supervised child needs."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Forked:
    """A child process that another process forked for us."""

    pid: int
    _code: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it) once the process has ended; None while it
        runs."""
        if self._code is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                found, status = self.pid, signal.SIGKILL  # it was dead before it became our child
            if found:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
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
    """The fork server's process. The supervisor keeps it alive by calling `ensure_running`."""

    def __init__(
        self,
        argv: Sequence[str],
        env_vars: Mapping[str, str],
        *,
        log: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._argv = argv
        self._env_vars = env_vars
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
        """Seconds until `ensure_running` would start the fork server (0: now); None while it runs."""
        if self._process is not None and self._process.poll() is None:
            return None
        if not self._starts:
            return 0.0
        return max(0.0, self._started_at + REVIVE_S - self._clock())

    def ensure_running(self) -> None:
        """Start the fork server if it is due. Also makes the calling process a child subreaper, so the
        forked workers become its children."""
        if self.due_in_s() != 0.0:
            return
        self._close()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                self._argv,
                env=dict(self._env_vars),
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

    def is_starting(self) -> bool:
        """Whether it is starting for the first time. Waiting for it is then faster than starting a
        worker as a new program."""
        if self._starts > 1 or self._process is None or self._process.poll() is not None:
            return False
        return not self._is_ready() and self._clock() < self._started_at + START_S

    def fork(
        self, arguments: Sequence[str], env_vars: Mapping[str, str], log: Path
    ) -> Process | None:
        """Fork a new worker. Returns None if the worker must be started as a new program instead."""
        if self._channel is None or not self._is_ready():
            return None
        request = {"arguments": arguments, "env_vars": dict(env_vars), "log": str(log)}
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            pid = json.loads(_line(self._channel))
        except (OSError, ValueError):
            self._close()  # dead or hung: a late answer must not be taken for the next request's
            return None
        return Forked(pid) if isinstance(pid, int) else None

    def stop(self) -> None:
        """End the fork server. The workers that it forked keep running."""
        self._close()

    def _is_ready(self) -> bool:
        if not self._ready and self._channel is not None:
            self._channel.settimeout(0)
            try:
                self._ready = self._channel.recv(1) == b"\n"
            except OSError:
                pass  # it is not ready yet
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
    """Read one line of an answer. Raises OSError when none arrives."""
    said = b""
    while not said.endswith(b"\n"):
        piece = channel.recv(64)
        if not piece:
            raise ConnectionResetError("the fork server is gone")
        said += piece
    return said


def reap_orphans(known: set[int]) -> None:
    """Reap dead processes that nothing in this process waits for. As a subreaper we inherit the children
    of our children when those die. `known` are the pids that something in this process waits for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return  # a known child died just now: its own poll reaps it
        os.waitpid(found.si_pid, os.WNOHANG)
