"""Level `bwrap`: namespaces, a filter of system calls, no capabilities and no network, by bubblewrap.

A sandbox sees the programs of /usr, what its command may read, and a /tmp of its own, which is bounded.
When its first process is killed, the kernel kills all its processes before that death is reported.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from infra.sandbox.levels.bubblewrap_errors import explain
from infra.sandbox.levels.bubblewrap_options import BubblewrapPlan, build, encode
from infra.sandbox.levels.cgroups import ControlGroup, find_place, memory_bound
from infra.sandbox.levels.level import ConfinedCommand, ProcessLimits
from infra.sandbox.levels.memory_watch import watch_memory
from infra.sandbox.user_process import LAST_UNPRIVILEGED, UNPRIVILEGED, UserProcess

INFO_S = 20.0
"""How long bubblewrap may take to make the namespaces."""

LONGEST_INFO = 4096
OPTIONS_BYTES = 1 << 20
LIMITED = (
    "exec 3>&2 2>/dev/null; echo 1000 >/proc/self/oom_score_adj;"
    ' ulimit -c 0; ulimit -v "$1"; ulimit -f "$2"; ulimit -n "$3";'
    ' ulimit -u "$4" || ulimit -p "$4"; exec 2>&3 3>&-; shift 4; exec "$@"'
)
"""Sets the limits, and has the kernel kill this process first when memory runs out. Lower limits of the
system stay in force. The parent could not set them, because that needs CAP_SYS_RESOURCE, which root has
in few containers."""

REMOVE_S, REMOVE_TRIES = 0.02, 50
"""The kernel may count a dead process in its group for a moment, so removing a group is repeated."""


class SandboxProcess(UserProcess):
    """A bubblewrap process. It is dead when the first process of its sandbox is. The kernel kills all
    others before that, so nothing of a dead sandbox can still write."""

    _first: int | None = None

    async def follow(self, pid: int) -> None:
        """Take `pid` as the first process of the sandbox, if it is a child of this process. If this
        process has ended already, wait for the end of the other one, which the kernel kills then."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            if self.alive and _parent(pid) == self.pid:
                self._first = descriptor
                return
            try:
                await _wait_for_end(descriptor)
            finally:
                os.close(descriptor)

    def kill(self) -> None:
        if self._first is None:
            super().kill()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def end(self, *, within_s: float) -> bool:
        self.kill()
        if await self.wait(within_s=within_s):
            return True
        self._close_first()
        return await super().end(within_s=within_s)

    def _on_exit(self) -> None:
        """Bubblewrap ends when its command does, and leaves what the command started to the kernel. Wait
        for that too."""
        if self._first is None:
            super()._on_exit()
            return
        self._stop_watching()
        self.kill()
        self._loop.add_reader(self._first, super()._on_exit)

    def _forget(self) -> None:
        self._close_first()
        super()._forget()

    def _close_first(self) -> None:
        if self._first is not None:
            self._loop.remove_reader(self._first)
            os.close(self._first)
            self._first = None


class BubblewrapLevel:
    """`infra.sandbox.levels.level.Level` by bubblewrap, the program at `program`."""

    name = "bwrap"

    def __init__(self, program: Path) -> None:
        self._program = program
        self._users: set[int] = set()
        self._ended: set[ControlGroup] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self, command: ConfinedCommand) -> UserProcess:
        """Start a command. Bubblewrap gets its options only when the command's limits hold, and does
        nothing before."""
        place = find_place()
        group = ControlGroup(place, command.limits) if place else None
        uid = self._take_user()

        def clean_up() -> None:
            self._users.discard(uid)
            if group is not None:
                group.kill()
                self._ended.add(group)
                self._sweep()

        with ExitStack() as held:
            try:
                plan = self._plan(command, held, counted=group is not None)
                options = plan.options
                reading, writing = (held.enter_context(end) for end in _pipe())
                info, inform = (held.enter_context(end) for end in _pipe())
                process = SandboxProcess(
                    _command_line(plan, self._program, reading.fileno()),
                    env={},
                    cwd=Path("/"),
                    pass_fds=(
                        *(reading.fileno(), inform.fileno()),
                        *options.descriptors,
                        *command.pass_fds,
                    ),
                    uid=uid,
                    on_end=clean_up,
                )
            except BaseException:
                clean_up()
                raise
            try:
                _bound_memory(process.pid, group)
                _send(writing, encode(("--info-fd", str(inform.fileno()), *options.arguments)))
                inform.close()
                await process.follow(await _first_process(info, process))
                if group is None:
                    self._watch(process, command.limits)
            except BaseException:
                process.kill()
                os.close(process.output)
                raise
        return process

    async def aclose(self) -> None:
        for watching in tuple(self._watching):
            watching.cancel()
        for _ in range(REMOVE_TRIES):
            self._sweep()
            if not self._ended:
                return
            await asyncio.sleep(REMOVE_S)

    def _watch(self, process: UserProcess, limits: ProcessLimits) -> None:
        watching = asyncio.ensure_future(watch_memory(process, memory_bound(limits)))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    def _sweep(self) -> None:
        """Remove the groups of sandboxes that have ended, and try again later if one is left."""
        self._ended = {group for group in self._ended if not group.remove()}
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        if self._ended:
            self._sweeping = asyncio.get_running_loop().call_later(REMOVE_S, self._sweep)

    def _plan(self, command: ConfinedCommand, held: ExitStack, *, counted: bool) -> BubblewrapPlan:
        """The plan of a sandbox for a command."""
        options = build(command, held, counted=counted)
        return BubblewrapPlan(options, tuple(command.argv), command.limits)

    def _take_user(self) -> int:
        """A user for one sandbox, which no other one of this process has, if there are enough. Other
        processes may have chosen it too, so this is not what keeps sandboxes apart."""
        users = range(UNPRIVILEGED + 1, LAST_UNPRIVILEGED + 1)
        free = [uid for uid in users if uid not in self._users]
        uid = random.choice(free or users)  # noqa: S311 - not a secret
        self._users.add(uid)
        return uid


def _command_line(plan: BubblewrapPlan, program: Path, options: int) -> list[str]:
    """The command line that sets the limits of processes and becomes bubblewrap. The number of processes
    of a user is only limited if a sandbox has the user to itself, which is so as root."""
    limits = plan.limits
    processes = limits.processes if os.geteuid() == 0 else "unlimited"
    values = (limits.memory_bytes >> 10, limits.file_bytes >> 9, limits.files, processes)
    shell = ["/bin/sh", "-c", LIMITED, "sh", *map(str, values)]
    return [*shell, str(program), "--args", str(options), "--", *plan.argv]


def _bound_memory(pid: int, group: ControlGroup | None) -> None:
    if group is not None:
        group.add(pid)


def _send(writing: BinaryIO, options: bytes) -> None:
    """Write the options without waiting, and close the pipe."""
    with contextlib.suppress(PermissionError):  # the user may not have so large pipes
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, OPTIONS_BYTES)
    most = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    if len(options) > most:
        raise OSError(
            errno.E2BIG,
            f"the variables have more than {most} bytes in all; set fewer or shorter ones",
        )
    with contextlib.suppress(BrokenPipeError), writing:  # it says why in its output
        writing.write(options)


async def _first_process(info: BinaryIO, process: UserProcess) -> int:
    """Return the pid of a sandbox's first process, which bubblewrap reports. Raises InvalidConfig when
    bubblewrap cannot make the sandbox here."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LONGEST_INFO)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), info)
    try:
        async with asyncio.timeout(INFO_S):
            return int(json.loads(await reader.readuntil(b"}"))["child-pid"])
    except asyncio.IncompleteReadError as error:
        await process.wait(within_s=INFO_S)
        os.set_blocking(process.output, False)
        with contextlib.suppress(BlockingIOError):
            raise explain(os.read(process.output, LONGEST_INFO).decode(errors="replace")) from error
        raise OSError(f"bubblewrap ended without a word: {process.pid}") from error
    except TimeoutError as error:
        raise OSError(f"bubblewrap made no sandbox within {INFO_S:g} s") from error
    finally:
        transport.close()


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    """The ends of a new pipe, to read and to write."""
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)


async def _wait_for_end(descriptor: int) -> None:
    """Wait until the process of a pidfd is dead. Raises OSError when that takes too long."""
    loop, is_dead = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_dead.set)
    try:
        async with asyncio.timeout(INFO_S):
            await is_dead.wait()
    except TimeoutError as error:
        raise OSError(f"a sandbox did not end within {INFO_S:g} s after its command") from error
    finally:
        loop.remove_reader(descriptor)


def _parent(pid: int) -> int:
    """The parent of a process, or 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
