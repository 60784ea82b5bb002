"""A process of user code, seen from its parent: started, ended and reaped, whatever it does.

It is watched through a pidfd, which only reports its death. `waitpid` would also return for a process
that let itself be traced and stopped, and asyncio takes that for its end.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

UNPRIVILEGED = 64731
"""The user and group of user code when we are root. They own nothing."""

_unreaped: set[int] = set()
"""Dead processes that another process still traces, so that the kernel keeps them."""


class UserProcess:
    """A started process in a session of its own. `output` is a pipe with its output; the caller closes
    it."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, pass_fds: Sequence[int]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        confined = os.geteuid() == 0
        self._dead = asyncio.Event()
        _reap()
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                user=UNPRIVILEGED if confined else None,
                group=UNPRIVILEGED if confined else None,
                extra_groups=() if confined else None,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid
        self.output = reading
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def kill(self) -> None:
        """Kill it and its process group. Does nothing when it is dead."""
        if self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, *, within_s: float) -> bool:
        """Wait for its death, for at most `within_s` seconds. Returns whether it is dead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._dead.wait()
        return self._dead.is_set()

    async def end(self, *, within_s: float) -> None:
        """Kill it and wait. If it does not die, kill the process that traces it, and then give it up."""
        self.kill()
        if await self.wait(within_s=within_s):
            return
        _kill_tracer(self.pid)
        if not await self.wait(within_s=within_s):
            logger.warning(
                "process %d of user code does not end after SIGKILL; giving it up", self.pid
            )
            self._forget()

    def _on_exit(self) -> None:
        """It is dead, but not reaped yet, so its process id is still its own. The rest of its group can
        be killed, and nothing else."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._forget()

    def _forget(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._process.returncode = -signal.SIGKILL  # Popen would wait for it by itself
        _unreaped.add(self.pid)
        _reap()
        self._dead.set()


def _reap() -> None:
    """Reap the dead processes, and none that lives."""
    for pid in tuple(_unreaped):
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None:
                _unreaped.discard(pid)
        except ChildProcessError:
            _unreaped.discard(pid)


def _kill_tracer(pid: int) -> None:
    """Kill a process of user code that traces this one and so keeps it from being reaped. Only as root,
    where the user of user code has no other processes."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        tracer = int(next(line for line in status if line.startswith("TracerPid:")).split()[1])
        if tracer and os.geteuid() == 0:
            owner = Path(f"/proc/{tracer}/status").read_text()
            if f"\nUid:\t{UNPRIVILEGED}\t" in owner:
                os.kill(tracer, signal.SIGKILL)
