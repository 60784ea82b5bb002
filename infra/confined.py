"""One confined process that hosts a role of an entry point, and the calls to it.

Level `process`: another user (as root), limits, an empty environment, a session of its own. It trusts
the code's author; it keeps accidents, not attackers, from the platform.
"""

import asyncio
import contextlib
import json
import logging
import os
import pwd
import shutil
import signal
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import FailureCategory, InvalidConfig, TransientError, UserCodeError

logger = logging.getLogger(__name__)

Json = dict[str, object]

UNPRIVILEGED = 64731
"""The user and group that user code runs as when we are root. It owns nothing."""

GRACE_S = 2.0
"""After its deadline a call has this long to say so itself; then its process is ended."""

START_S = 60.0
LONGEST_MESSAGE = 64 << 20
KEPT_OUTPUT = 64 << 10


def interpreter() -> str:
    """A Python that user code's user can run: ours if it can be reached, else the system's.

    Raises InvalidConfig when there is none (our own may live below a private directory).
    """
    ours = Path(sys.executable).resolve()
    if os.geteuid() != 0 or _reachable(ours):
        return str(ours)
    for name in ("python3.12", "python3.11", "python3"):
        found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
        if found and _reachable(Path(found).resolve()):
            return found
    raise InvalidConfig(
        f"user code cannot run {ours}: a directory above it is private. Install a system Python "
        "(Debian: apt-get install python3), or make the directory passable (chmod o+x)"
    )


def _reachable(path: Path) -> bool:
    return all(place.stat().st_mode & 0o001 for place in (path, *path.parents))


@dataclass(slots=True)
class _Call:
    future: "asyncio.Future[Json]"
    overdue: asyncio.TimerHandle


class Ended(TransientError):
    """The process ended while it loaded or with calls in flight; what it did there may be the reason, or
    somebody else: an operator, the kernel for want of memory, another call."""


class ConfinedProcess:
    """Hosts a role. Calls run side by side; if the process ends, those in flight raise Ended."""

    def __init__(self, role: str, sdk: Path, entrypoint: Path, env: Mapping[str, str]) -> None:
        self._role = role
        self._sdk = sdk
        self._entrypoint = entrypoint
        self._env = dict(env)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[str, _Call] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stuck: str | None = None
        self._why: str | None = None
        self.output = bytearray()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self._why

    async def start(self) -> Json:
        """Start it; returns its first message. Raises UserCodeError when the entry point does not
        load or says nothing in time, Ended when the process ended (the reason may be another's)."""
        try:
            reader = await self._connect(*await self._spawn())
            self._tasks.append(asyncio.ensure_future(self._drain()))
            first = await self._first(reader)
        except BaseException:  # who was cancelled as well: nobody else knows of this process
            await self.aclose()
            raise
        self._tasks.append(asyncio.ensure_future(self._listen(reader)))
        return first

    async def call(self, name: str, message: Json, *, deadline_s: float) -> Json:
        """One call. Raises UserCodeError when its code raised or did not end in time, Ended when the
        process ended for a reason that may be another's."""
        if not self.alive or self._writer is None:
            raise Ended(self._why or "the process has ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Json] = loop.create_future()
        timer = loop.call_later(deadline_s + GRACE_S, self._overdue, name, deadline_s)
        self._calls[name] = _Call(future, timer)
        data = json.dumps({"id": name, "deadline_s": deadline_s, **message}).encode()
        try:
            self._writer.write(struct.pack(">I", len(data)) + data)
            return _result(await future, self._role)
        finally:
            timer.cancel()
            self._calls.pop(name, None)

    async def aclose(self) -> None:
        """End the process and all it started."""
        self._end("closed")
        if self._process is not None:
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    async def _spawn(self) -> tuple[int, int]:
        """Start the process; the pipes' ends to write to it, and to read from it."""
        python, confined = interpreter(), os.geteuid() == 0
        inward, outward = os.pipe(), os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                python,
                "-I",
                str(self._sdk / "headrace" / "host.py"),
                self._role,
                str(inward[0]),
                str(outward[1]),
                str(self._entrypoint),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(inward[0], outward[1]),
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", **self._env},  # noqa: S108 - not ours
                cwd=self._entrypoint.parent,
                start_new_session=True,
                user=UNPRIVILEGED if confined else None,
                group=UNPRIVILEGED if confined else None,
                extra_groups=() if confined else None,
            )
        except BaseException:
            os.close(inward[1])
            os.close(outward[0])
            raise
        finally:
            os.close(inward[0])
            os.close(outward[1])
        return inward[1], outward[0]

    async def _first(self, reader: asyncio.StreamReader) -> Json:
        """What it says once it has loaded. Raises what `start` raises."""
        try:
            async with asyncio.timeout(START_S):
                first = await _receive(reader)
        except asyncio.IncompleteReadError as error:
            raise Ended(
                f"the entry point's process ended while loading: {await self._said()}"
            ) from error
        except TimeoutError as error:
            why = f"the entry point did not load within {START_S:g} s: {await self._said()}"
            raise UserCodeError(FailureCategory.PROCESS, why) from error
        except ValueError as error:
            why = f"the entry point's process wrote into what is ours alone: {error}"
            raise UserCodeError(FailureCategory.PROCESS, why) from error
        if "unusable" in first:
            raise UserCodeError(FailureCategory.VALIDATION, str(first["unusable"]))
        return first

    async def _said(self) -> str:
        """End the process; the end of what it printed."""
        await self.aclose()
        return self.output.decode(errors="replace").strip()[-500:]

    async def _connect(self, writing: int, reading: int) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LONGEST_MESSAGE)
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(writing, "wb")
        )
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await _receive(reader)
                if "stuck" in message:
                    self._stuck = str(message["stuck"]) if message["stuck"] else None
                    continue
                self._stuck = None
                call = self._calls.get(str(message.get("id")))
                if call is not None and not call.future.done():
                    call.future.set_result(message)
        except (asyncio.IncompleteReadError, ValueError):
            self._end("its process ended")

    async def _drain(self) -> None:
        """Read what user code prints; keep the first bytes, drop the rest."""
        if self._process is None or self._process.stdout is None:
            return
        while chunk := await self._process.stdout.read(1 << 16):
            self.output += chunk[: KEPT_OUTPUT - len(self.output)]

    def _overdue(self, name: str, deadline_s: float) -> None:
        """A call did not even say that it is late: something holds the process. End it, blame whom
        the process itself named, let the others run again."""
        culprit = self._stuck or name
        call = self._calls.get(culprit)
        if call is not None and not call.future.done():
            text = f"it held the process past its deadline of {deadline_s:g} s"
            call.future.set_exception(UserCodeError(FailureCategory.TIMEOUT, text))
        self._end(f"{culprit} held its process")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(Ended(self._why))


async def _receive(reader: asyncio.StreamReader) -> Json:
    size = struct.unpack(">I", await reader.readexactly(4))[0]
    if size > LONGEST_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    message: Json = json.loads(await reader.readexactly(size))
    return message


def _result(message: Json, role: str) -> Json:
    if "category" not in message:
        return message
    raised = FailureCategory.GRADER if role == "grader" else FailureCategory.AGENT
    category = FailureCategory.TIMEOUT if message["category"] == "timeout" else raised
    raise UserCodeError(category, str(message["error"]))


def describe_user() -> str:
    """Who user code runs as, for the log."""
    if os.geteuid() == 0:
        return f"uid {UNPRIVILEGED}"
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user need not have an entry
        return f"uid {os.geteuid()}"
