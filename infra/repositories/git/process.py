"""Run git with our own configuration only, under limits and with a deadline.

A hostile repository can make git use any amount of resources, so the process and its children have
limits on CPU time, address space, file size and the number of processes. A shell sets them before it
executes git. Output is read as a stream, and the amount that is kept is bounded too.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from infra.repositories.git.access import NO_PINS, Pins
from infra.repositories.git.confinement import GitConfinement, GitFiles
from infra.repositories.git.login import NO_LOGIN, GitLogin
from infra.repositories.git.urls import Protocol
from infra.task_cancellation import TaskGroup
from schemas.errors import RepositoryAway

CPU_S = 240
ADDRESS_BYTES = 2 << 30
FILE_BYTES = 1 << 30
PROCESSES = 4096
"""Limits of one git process and of each of its children: seconds of CPU time, bytes of address space,
bytes of a file, and number of processes. The last one counts all processes of our user."""

MOST_OUTPUT = 16 << 20
MOST_ERRORS = 4 << 20
KEPT_ERRORS = 16 << 10
"""The bytes of output and of error text after which git is ended, and how much of the error text is
kept. A server can make git print both without an end."""

CHUNK = 1 << 18

OLDEST = (2, 37)
"""The oldest git that knows `http.curloptResolve`."""

LOCAL_S = 300.0
"""How many seconds a command without network access may take."""

END_S = 5.0
"""How long to wait for the pipes of an ended process. A child in another session may keep them open."""

LIMITED = (
    'ulimit -c 0; ulimit -S -t "$1"; ulimit -H -t "$(($1 + 10))"; ulimit -v "$2"; ulimit -f "$3";'
    ' ulimit -u "$4" 2>/dev/null || ulimit -p "$4" 2>/dev/null;'
    ' shift 4; trap "" XFSZ; exec "$@"'
)
"""Sets the limits, then executes the command. Lower limits of the system stay in force. The soft limit
of CPU time is below the hard one, so that the process ends by SIGXCPU, which identifies that limit. A
file that would be too large is an error of git, and no signal that ends a child of it without a word."""

CONFIG = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.bigFileThreshold=64m",
    "core.packedGitLimit=512m",
    "pack.threads=1",
    "transfer.fsckObjects=true",
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
    "http.followRedirects=false",
    "transfer.unpackLimit=1",
    "transfer.credentialsInUrl=die",
    "transfer.bundleURI=false",
    "submodule.recurse=false",
    "safe.directory=*",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.allow=never",
)

"""Redirects are off, because each would be dialled without a check of its address. That also switches
off `objects/info/http-alternates`. With an unpack limit of 1 every transfer is one file, so the limit on
a file's size bounds it while it arrives."""

SSH = (
    "ssh -oBatchMode=yes -oConnectTimeout=30 -oServerAliveInterval=15 -oClearAllForwardings=yes"
    " -oForwardAgent=no -oPermitLocalCommand=no"
)

PRIORITY, LOW_PRIORITY = 5, 10
"""By how much the niceness of a command is raised, and of one in the background. The process that serves
requests comes first."""


@dataclass(frozen=True, slots=True)
class GitSource:
    """The repository that a command reaches, by the one `protocol` that it may use. `url` is checked,
    and `pins` tie its host to addresses that were checked. Git reads `config` as the user's file. A
    transfer of more than `most_bytes` is cut off. A command in the `background` runs at the lowest
    priority."""

    url: str
    config: Path
    login: GitLogin = NO_LOGIN
    background: bool = False
    protocol: Protocol = "file"
    pins: Pins = NO_PINS
    most_bytes: int = FILE_BYTES


class GitFailed(Exception):
    """Git failed, with this exit status (negative: the signal that ended it) and error text. A file
    could have `most_bytes`."""

    def __init__(self, status: int, stderr: str, *, most_bytes: int = FILE_BYTES) -> None:
        super().__init__(f"git ended with {status}: {stderr}")
        self.status = status
        self.stderr = stderr
        self.most_bytes = most_bytes


class GitTooLong(GitFailed):
    """Git was ended because it printed too much."""

    def __init__(self, most: int) -> None:
        super().__init__(-signal.SIGKILL, f"git printed more than {most >> 20} MiB")


class GitTimeout(GitFailed):
    """Git did not finish before its deadline."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(-signal.SIGKILL, f"no answer within {deadline_s:g} s")


CONFINEMENT: ContextVar[GitConfinement | None] = ContextVar("CONFINEMENT", default=None)
"""The sandbox of the commands of this task; None without one."""

SIGNALLED = {
    128 + number: -number
    for number in map(
        int,
        (
            signal.SIGABRT,
            signal.SIGBUS,
            signal.SIGFPE,
            signal.SIGKILL,
            signal.SIGSEGV,
            signal.SIGTERM,
            signal.SIGXCPU,
        ),
    )
}
"""The exit statuses by which a sandbox tells that a signal ended git."""


async def run_git(
    *arguments: str,
    where: Path | None = None,
    source: GitSource | None = None,
    send: bytes | None = None,
    sink: Callable[[bytes], None] | None = None,
    objects: Path | None = None,
    deadline_s: float = LOCAL_S,
) -> bytes:
    """Run git and return its output. With `sink`, the output goes there instead, piece by piece and in a
    thread; an error that `sink` raises ends git. `objects` is another repository whose objects git may
    read. Raises GitFailed, GitTimeout after `deadline_s`
    seconds, and OSError if git cannot be started."""
    settings = (item for setting in _config(source) for item in ("-c", setting))
    command = ("git", *settings, *arguments)
    process = await _start(command, where, source, objects, is_fed=send is not None)
    kept = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            said = await _talk(process, send, sink or _keeper(kept))
    except TimeoutError as error:
        raise GitTimeout(deadline_s) from error
    finally:
        await _end(process)
    if process.returncode:
        _kill_group(process)
        status = SIGNALLED.get(process.returncode, process.returncode)
        if source is None:
            raise GitFailed(status, said)
        told = source.login.redact(said)
        raise GitFailed(status, told, most_bytes=source.most_bytes)
    return bytes(kept)


async def _start(
    command: Sequence[str],
    where: Path | None,
    source: GitSource | None,
    objects: Path | None,
    *,
    is_fed: bool,
) -> asyncio.subprocess.Process:
    """Start git under its limits, and inside of a sandbox if there is one for this command."""
    env, descriptors = _env_vars(source, where, objects), tuple[int, ...]()
    confinement = CONFINEMENT.get()
    has_sandbox = where is not None if source is None else source.protocol != "file"
    with ExitStack() as held:
        line: Sequence[str] = command
        if confinement is not None and has_sandbox:
            files = _files(where, source, objects)
            line, descriptors = confinement.wrap(command, held, env=env, cwd=where, files=files)
            env = {"PATH": env["PATH"]}
        return await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            LIMITED,
            "sh",
            *_limits(source),
            *line,
            cwd=where,
            env=env,
            stdin=asyncio.subprocess.PIPE if is_fed else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=CHUNK,
            start_new_session=True,
            pass_fds=descriptors,
        )


def _files(where: Path | None, source: GitSource | None, objects: Path | None) -> GitFiles:
    """The files of a command. Only a command that reaches a repository writes to its mirror."""
    places = tuple(path for path in (where,) if path is not None)
    others = tuple(path for path in (objects,) if path is not None)
    if source is None:
        return GitFiles(readable=(*places, *others))
    return GitFiles(places, (*others, source.config), source.protocol, source.login)


async def _talk(
    process: asyncio.subprocess.Process, send: bytes | None, sink: Callable[[bytes], None]
) -> str:
    """Write git's input and read its output at the same time. Returns its error text. An error in one of
    the three tasks cancels the others."""
    try:
        async with TaskGroup() as together:
            together.create_task(_give(process, send))
            together.create_task(_take(process, sink))
            saying = together.create_task(_errors(process))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    await process.wait()
    return saying.result()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill git and its children. Its pipes are read until they are empty, because asyncio does not
    notice the end of a process while a pipe is full."""
    if process.returncode is not None:
        return
    _kill_group(process)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(CHUNK):
                    pass
            await process.wait()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of git's process group: git itself, or the children of a git that failed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _limits(source: GitSource | None) -> tuple[str, ...]:
    """The arguments of LIMITED before the command, with the command that lowers the priority."""
    most = FILE_BYTES if source is None else min(FILE_BYTES, source.most_bytes)
    numbers = (CPU_S, ADDRESS_BYTES >> 10, most >> 9, PROCESSES)
    nice = LOW_PRIORITY if source is not None and source.background else PRIORITY
    return (*map(str, numbers), "nice", "-n", str(nice))


async def _give(process: asyncio.subprocess.Process, send: bytes | None) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(send or b"")
        await process.stdin.drain()
    process.stdin.close()


async def _take(process: asyncio.subprocess.Process, sink: Callable[[bytes], None]) -> None:
    assert process.stdout is not None  # noqa: S101 - it was started with one
    while chunk := await process.stdout.read(CHUNK):
        await asyncio.to_thread(sink, chunk)


async def _errors(process: asyncio.subprocess.Process) -> str:
    """The last KEPT_ERRORS bytes of git's error text. Raises GitTooLong, because a server can make it
    arbitrarily long."""
    assert process.stderr is not None  # noqa: S101 - it was started with one
    kept, is_cut, count = b"", False, 0
    while chunk := await process.stderr.read(CHUNK):
        count += len(chunk)
        if count > MOST_ERRORS:
            raise GitTooLong(MOST_ERRORS)
        is_cut = is_cut or len(kept) + len(chunk) > KEPT_ERRORS
        kept = (kept + chunk)[-KEPT_ERRORS:]
    if is_cut:  # half of a secret would not be recognized
        kept = kept.partition(b"\n")[2]
    text = kept.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).strip()


def _keeper(kept: bytearray) -> Callable[[bytes], None]:
    def keep(chunk: bytes) -> None:
        if len(kept) + len(chunk) > MOST_OUTPUT:
            raise GitTooLong(MOST_OUTPUT)
        kept.extend(chunk)

    return keep


def _config(source: GitSource | None) -> tuple[str, ...]:
    if source is None:
        return CONFIG
    return (*CONFIG, f"protocol.{source.protocol}.allow=always", *source.pins.settings)


def _env_vars(source: GitSource | None, where: Path | None, objects: Path | None) -> dict[str, str]:
    login = source.login if source else NO_LOGIN
    passed = ("PATH", "HOME", *(() if login.ssh else ("SSH_AUTH_SOCK",)))
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        **{name: os.environ[name] for name in passed if os.environ.get(name)},
        **_certificates(),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": str(source.config) if source else "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": source.protocol if source else "none",
        "GIT_ASKPASS": "/bin/false",
        "GIT_SSH_COMMAND": " ".join(
            filter(None, (SSH, source.pins.ssh if source else "", login.ssh))
        ),
        **login.variables,
        **({"GIT_DIR": str(where)} if where else {}),
        **({"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects / "objects")} if objects else {}),
    }


def _certificates() -> dict[str, str]:
    """The operator's certificates of servers, for a forge that no public authority signed."""
    file = os.environ.get("GIT_SSL_CAINFO") or os.environ.get("SSL_CERT_FILE")
    return {"GIT_SSL_CAINFO": file} if file else {}


async def check_version() -> None:
    """Raises RepositoryAway when git is older than OLDEST, because it would ignore the settings that
    pin addresses. An installed git is asked once."""
    global _version
    if _version is None:
        said = (await run_git("version")).decode(errors="replace")
        _version = parse_version(said)
    if _version < OLDEST:
        found, least = (".".join(map(str, one)) for one in (_version, OLDEST))
        _version = None
        raise RepositoryAway(
            f"git {found} of this machine is too old; install {least} or newer", pause_s=60.0
        )


_version: tuple[int, ...] | None = None


def parse_version(said: str) -> tuple[int, ...]:
    """Return the version from the output of `git version`, or (0,)."""
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0,)
