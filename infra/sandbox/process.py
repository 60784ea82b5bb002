"""One confined process that hosts a role of an entry point, and the calls to it.

The level says how it is confined (`infra/sandbox/levels/`).
"""

import asyncio
import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.sandbox.host_messages import (
    LARGEST,
    CallAnswer,
    Ended,
    EntrypointUnusable,
    FirstMessage,
    NotServed,
    ProtocolError,
    Raised,
    Ready,
    Stuck,
    parse_first,
    parse_later,
)
from infra.sandbox.interpreter import Interpreter, find_interpreter
from infra.sandbox.levels.level import ConfinedCommand, Level, ProcessLimits
from infra.sandbox.user_process import UserProcess
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.toml.env_vars import reserved_env

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long after its deadline a call may take to report the timeout itself. Then its process is
killed."""

START_S = 60.0
SERVER_START_S = 300.0
"""How long an entry point may take to load, and a rollout server to serve."""

MOST_SERVED = 64
"""How many calls a rollout server gets at the same time. It may ask for fewer. The others wait here,
where their time does not run."""

END_S = 5.0
"""How long to wait for the end of a killed process before giving it up."""

MESSAGE_S = 30.0
"""How long a message may take to arrive, from its length prefix to its last byte."""

READ_AHEAD = 1 << 20
ENV_PREFIX = "HEADRACE_ENV_"
"""The prefix of a rollout's own variables, for `headrace/user_code/launch.py`."""

LIMITS = "HEADRACE_LIMITS"
"""The variable with the limits that `headrace/user_code/launch.py` sets."""

MOST_STRAYS = 64
STRAYS_PER_S = 8
"""How many messages that belong to no call are allowed at once, and how many more per second. Such
messages are late answers and the reports of a stuck process, which come twice a second."""

LAUNCHED = b"\0"
"""The launcher's first byte. A process that ends before it sent this has run no user code."""

KEPT_OUTPUT = 64 << 10
SILENT = (
    "it printed nothing; look for an endless loop or os._exit in the entry point and in the .pth files "
    "of its packages, which Python runs as it starts"
)


@dataclass(slots=True)
class _Call:
    future: "asyncio.Future[CallAnswer]"
    overdue: asyncio.TimerHandle


class ProcessEnded(TransientError):
    """The process ended while it loaded or while calls were open. The cause may be the code that it ran,
    or something else: an operator, the kernel (out of memory), another call."""


class ConfinedProcess:
    """A process that hosts one role. Its calls run concurrently. If it ends, open calls raise
    ProcessEnded."""

    def __init__(
        self,
        role: str,
        *,
        level: Level,
        sdk: Path,
        tree: Path,
        entrypoint: Path,
        env: Mapping[str, str],
        gateway: Path | None = None,
        network: Sequence[str] = (),
        python: Interpreter | None = None,
        limits: ProcessLimits | None = None,
    ) -> None:
        """Without `gateway`, it has no socket of the gateway. `network` are the addresses that the
        gateway's proxy connects to. `python` is the one with the packages of the rollout."""
        self._limits = limits or ProcessLimits()
        self._role = role
        self._level = level
        self.gateway = gateway
        self._sdk = sdk
        self._tree = tree
        self._entrypoint = entrypoint
        self._env = dict(env)
        self._network = network
        self._python = python
        self._process: UserProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: list[asyncio.BaseTransport] = []
        self._calls: dict[str, _Call] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stuck: Stuck | None = None
        self._why: str | None = None
        self._room = asyncio.Semaphore(MOST_SERVED)
        self._strays = 0.0
        self._strayed_at = 0.0
        self.output = bytearray()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive and not self._why

    async def start(self) -> FirstMessage:
        """Start the process and return its first message. Raises UserCodeError when the entry point does
        not load, sends nothing within START_S or sends something invalid, and ProcessEnded when the
        process ended, which may not be its own fault."""
        for name in self._env:
            if why := reserved_env(name):
                raise UserCodeError(FailureCategory.VALIDATION, f"env.{name} {why}")
        try:
            reader = await self._connect(*await self._spawn())
            first = await self._first(reader)
        except BaseException:  # also a cancellation, because nothing else knows this process
            await self.aclose()
            raise
        self._tasks.append(asyncio.ensure_future(self._listen(reader)))
        if isinstance(first, Ready) and first.capacity is not None:
            self._room = asyncio.Semaphore(min(first.capacity, MOST_SERVED))
        return first

    async def call(self, name: str, message: bytes, *, deadline_s: float) -> CallAnswer:
        """Make one call and return its answer, also when the code raised an error. `message` is a JSON
        object with at least one key. Raises UserCodeError when the code blocked its process past
        `deadline_s`, and ProcessEnded when the process ended, perhaps not because of this call."""
        if self._role != "server":
            return await self._call(name, message, deadline_s=deadline_s)
        async with self._room:
            if not self.alive:  # this call has not begun, so it is not the cause
                raise TransientError(self._why or "the process has ended")
            try:
                return await self._call(name, message, deadline_s=deadline_s)
            except asyncio.CancelledError:
                self._write(json.dumps({"id": name, "cancel": True}).encode())
                raise

    async def _call(self, name: str, message: bytes, *, deadline_s: float) -> CallAnswer:
        if not self.alive or self._writer is None:
            raise ProcessEnded(self._why or "the process has ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallAnswer] = loop.create_future()
        timer = loop.call_later(deadline_s + GRACE_S, self._overdue, name, deadline_s)
        self._calls[name] = _Call(future, timer)
        head = json.dumps({"id": name, "deadline_s": deadline_s})[:-1].encode() + b","
        try:
            self._write(head, memoryview(message)[1:])
            return _result(await future)
        finally:
            timer.cancel()
            self._calls.pop(name, None)

    def _write(self, *parts: bytes | memoryview) -> None:
        """Send one message to the process, if it has not ended."""
        if self._writer is not None and self.alive:
            size = sum(len(part) for part in parts)
            self._writer.writelines((struct.pack(">I", size), *parts))

    async def aclose(self) -> None:
        """End the process and everything that it started, within seconds, even if it resists."""
        self._end("closed")
        if self._process is not None:
            await self._process.end(within_s=END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for transport in self._reading:
            transport.close()
        if self._writer is not None:
            self._writer.close()

    async def _spawn(self) -> tuple[int, int]:
        """Start the process. Returns the pipe ends to write to it and to read from it."""
        inward, outward = os.pipe(), os.pipe()
        python = self._python or find_interpreter()
        programs = f"{python.path.parent}:" if self._python else ""
        fixed = {"PATH": f"{programs}/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}  # noqa: S108 - not ours
        own = {f"{ENV_PREFIX}{name}": value for name, value in self._env.items()}
        network = {"HEADRACE_NETWORK": ",".join(self._network)} if self._network else {}
        of = self._limits
        limits = (of.memory_bytes, of.file_bytes, of.processes, of.files)
        launcher = str(self._sdk / "headrace" / "user_code" / "launch.py")
        ends = (str(inward[0]), str(outward[1]))
        try:
            self._process = await self._level.start(
                ConfinedCommand(
                    [
                        *(str(python.path), "-I", "-S", launcher),
                        self._role,
                        *ends,
                        str(self._entrypoint),
                    ],
                    env={**fixed, LIMITS: " ".join(map(str, limits)), **network, **own},
                    cwd=self._entrypoint.parent,
                    readable=(self._sdk, self._tree, *python.files),
                    pass_fds=(inward[0], outward[1]),
                    gateway=self.gateway,
                    limits=of,
                )
            )
        except BaseException:
            os.close(inward[1])
            os.close(outward[0])
            raise
        finally:
            os.close(inward[0])
            os.close(outward[1])
        return inward[1], outward[0]

    async def _first(self, reader: asyncio.StreamReader) -> FirstMessage:
        """Wait for the launcher's sign of life, and for the message that the process sends once it has
        loaded. Raises the errors of `start`."""
        within_s = SERVER_START_S if self._role == "server" else START_S
        try:
            async with asyncio.timeout(within_s):
                if await reader.read(len(LAUNCHED)) != LAUNCHED:
                    text = await self._end_and_read()
                    raise TransientError(f"level {self._level.name} started no process: {text}")
                said = parse_first(self._role, await _receive(reader, self._role))
        except asyncio.IncompleteReadError as error:
            text = await self._end_and_read() or SILENT
            raise ProcessEnded(f"the entry point's process ended while loading: {text}") from error
        except TimeoutError as error:
            text = await self._end_and_read() or SILENT
            why = f"the entry point did not load within {within_s:g} s: {text}"
            raise UserCodeError(FailureCategory.PROCESS, why) from error
        except ProtocolError as error:
            why = f"the entry point's process wrote into a pipe that is not its own: {error}"
            raise UserCodeError(FailureCategory.PROCESS, why) from error
        if isinstance(said, EntrypointUnusable):
            raise UserCodeError(FailureCategory.VALIDATION, said.unusable)
        return said

    async def _end_and_read(self) -> str:
        """End the process and return the end of its output."""
        await self.aclose()
        return self.output.decode(errors="replace").strip()[-500:]

    async def _connect(self, writing: int, reading: int) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(writing, "wb")
        )
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        reader = await self._open_reader(reading)
        assert self._process is not None  # noqa: S101 - start has spawned it
        printed = await self._open_reader(self._process.output)
        self._tasks.append(asyncio.ensure_future(self._drain(printed)))
        return reader

    async def _open_reader(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=READ_AHEAD)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
        )
        self._reading.append(transport)
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Receive the process's messages until it ends. An invalid message ends the process."""
        try:
            while True:
                self._take(parse_later(self._role, await _receive(reader, self._role)))
        except asyncio.IncompleteReadError:
            self._end("its process ended")
        except (ProtocolError, TimeoutError) as error:
            self._end(f"its process wrote into a pipe that is not its own: {error or 'too slowly'}")

    def _take(self, message: Stuck | Ended | CallAnswer) -> None:
        """Handle one message. Raises ProtocolError when too many messages belong to no call."""
        if isinstance(message, Ended):
            self._end(message.ended)
            return
        call = None if isinstance(message, Stuck) else self._calls.get(message.id)
        if call is None:
            self._count_stray()
        if isinstance(message, Stuck):
            self._stuck = message
            return
        self._stuck = None
        if call is not None and not call.future.done():
            call.future.set_result(message)

    def _count_stray(self) -> None:
        now = asyncio.get_running_loop().time()
        self._strays = max(0.0, self._strays - STRAYS_PER_S * (now - self._strayed_at)) + 1
        self._strayed_at = now
        if self._strays > MOST_STRAYS:
            raise ProtocolError("it sent too many messages that belong to no call")

    async def _drain(self, printed: asyncio.StreamReader) -> None:
        """Read the output of user code. Keep the first KEPT_OUTPUT bytes and drop the rest."""
        while chunk := await printed.read(1 << 16):
            self.output += chunk[: KEPT_OUTPUT - len(self.output)]

    def _overdue(self, name: str, deadline_s: float) -> None:
        """Handle a call that is past its deadline and did not report it, so something blocks the
        process. End the process, and fail the call that the process reported as blocking, or this
        one if it reported none. The other calls get ProcessEnded and run again."""
        stuck = self._stuck if self._stuck is not None else Stuck(stuck=None)
        culprit = stuck.stuck or name
        call = self._calls.get(culprit)
        if call is not None and not call.future.done():
            text = f"it blocked its process past its deadline of {deadline_s:g} s"
            if stuck.output is not None and culprit == stuck.stuck:
                raised = Raised(id=culprit, category="timeout", error=text, output=stuck.output)
                call.future.set_result(raised)
            else:
                call.future.set_exception(UserCodeError(FailureCategory.TIMEOUT, text))
        self._end(f"{culprit} held its process")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        if self._process is not None:
            self._process.kill()
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(ProcessEnded(self._why))


async def _receive(reader: asyncio.StreamReader, role: str) -> bytes:
    """Read one message. Raises ProtocolError when it is too long, TimeoutError when it does not arrive
    within MESSAGE_S, and asyncio.IncompleteReadError when the process ended."""
    head = await reader.readexactly(4)
    size = struct.unpack(">I", head)[0]
    if size > LARGEST[role]:
        raise ProtocolError(f"it announced a message of {size} bytes, more than {LARGEST[role]}")
    async with asyncio.timeout(MESSAGE_S):
        return await reader.readexactly(size)


def _result(message: CallAnswer) -> CallAnswer:
    if isinstance(message, NotServed) and message.category == "again":
        raise TransientError(message.error)
    return message
