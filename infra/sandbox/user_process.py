"""Starts, ends and reaps a process of user code, even if that process resists.

The process is watched through a pidfd, which only reports its death. `waitpid` would also return for a
process that let itself be traced and stopped, and asyncio would mistake that for its end.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

UNPRIVILEGED = 64731
"""The user and group of user code when we are root. They own nothing."""


LAST_UNPRIVILEGED = 65533
"""The last user of user code. Each sandbox of level `bwrap` runs as one of the users in between, so that
no sandbox uses up what the kernel counts per user. Their group is UNPRIVILEGED."""


def user_group() -> int | None:
    """The group of user code, if it is not ours."""
    return UNPRIVILEGED if os.geteuid() == 0 else None


def user_uids() -> range:
    """The users that user code may have."""
    own = os.geteuid()
    return range(UNPRIVILEGED, LAST_UNPRIVILEGED + 1) if own == 0 else range(own, own + 1)


_unreaped: set[int] = set()
"""The pids of dead processes that are not reaped yet, for example because another process traces
them."""


class UserProcess:
    """A started process in a session of its own. `output` is the read end of a pipe with its output. The
    caller must close it. If we are root, it runs as `uid`. `on_end` is called when it is dead."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        pass_fds: Sequence[int],
        uid: int = UNPRIVILEGED,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        confined = os.geteuid() == 0
        self._dead = asyncio.Event()
        self._on_end = on_end
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
                user=uid if confined else None,
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
        """Kill the process and its process group. Does nothing when the process is dead."""
        if self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, *, within_s: float) -> bool:
        """Wait at most `within_s` seconds for the process to die. Returns whether it is dead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._dead.wait()
        return self._dead.is_set()

    async def end(self, *, within_s: float) -> bool:
        """Kill the process and wait at most `within_s` seconds for its death. If it does not die, kill
        the process that traces it and wait again. After that, log a warning, stop waiting for it and
        return False."""
        self.kill()
        if await self.wait(within_s=within_s):
            return True
        _kill_tracer(self.pid)
        if await self.wait(within_s=within_s):
            return True
        logger.warning("process %d of user code does not end after SIGKILL; giving it up", self.pid)
        self._forget()
        return False

    def _on_exit(self) -> None:
        """Kill the rest of the process's group. The process is dead but not reaped yet, so no other
        group can have its id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._forget()

    def _stop_watching(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)

    def _forget(self) -> None:
        self._stop_watching()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._process.returncode = -signal.SIGKILL  # otherwise Popen would wait for it
        _unreaped.add(self.pid)
        _reap()
        if not self._dead.is_set():
            self._dead.set()
            self._on_end()


def _reap() -> None:
    """Reap those of `_unreaped` that are dead and can be reaped now. Does not block."""
    for pid in tuple(_unreaped):
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None:
                _unreaped.discard(pid)
        except ChildProcessError:
            _unreaped.discard(pid)


def _kill_tracer(pid: int) -> None:
    """Kill a process of user code that traces this process and so prevents it from being reaped. Does
    this only as root, because only then does the user of user code have no other processes."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        tracer = int(next(line for line in status if line.startswith("TracerPid:")).split()[1])
        if tracer and os.geteuid() == 0:
            owner = Path(f"/proc/{tracer}").stat().st_uid
            if UNPRIVILEGED <= owner <= LAST_UNPRIVILEGED:
                os.kill(tracer, signal.SIGKILL)
