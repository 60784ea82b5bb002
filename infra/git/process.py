"""Run git with our own configuration only, under limits and with a deadline.

A hostile repository can make git use any amount of resources, so the process and its children have
limits on CPU time, address space, file size and the number of processes. A shell sets them before it
executes git. Output is read as a stream, and the amount that is kept is bounded too.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.git.login import NO_LOGIN, GitLogin

CPU_S = 240
ADDRESS_BYTES = 4 << 30
FILE_BYTES = 1 << 30
PROCESSES = 4096
"""Limits of one git process and of each of its children: seconds of CPU time, bytes of address space,
bytes of a file, and number of processes. The last one counts all processes of our user."""

MOST_OUTPUT = 64 << 20
KEPT_ERRORS = 16 << 10
CHUNK = 1 << 18

LOCAL_S = 300.0
"""How many seconds a command without network access may take."""

END_S = 5.0
"""How long to wait for the pipes of an ended process. A child in another session may keep them open."""

LIMITED = (
    'ulimit -c 0; ulimit -S -t "$1"; ulimit -H -t "$(($1 + 10))"; ulimit -v "$2"; ulimit -f "$3";'
    ' ulimit -u "$4" 2>/dev/null || ulimit -p "$4" 2>/dev/null;'
    ' shift 4; exec "$@"'
)
"""Sets the limits, then executes the command. Lower limits of the system stay in force. The soft limit
of CPU time is below the hard one, so that the process ends by SIGXCPU, which identifies that limit."""

CONFIG = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.bigFileThreshold=64m",
    "core.packedGitLimit=512m",
    "pack.threads=1",
    "transfer.fsckObjects=true",
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
    "safe.directory=*",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.allow=never",
)

SSH = "ssh -oBatchMode=yes -oConnectTimeout=30 -oServerAliveInterval=15"

LOW_PRIORITY = 10
GENTLY = ("nice", "-n", str(LOW_PRIORITY))
"""Begins a background command, whose niceness is raised by this much."""

PROTOCOLS = ("https", "ssh", "file")
"""The protocols of a command that reaches a repository. A local command may use none. `http` is added
for a repository of this machine only (`check_url`)."""


@dataclass(frozen=True, slots=True)
class GitSource:
    """The repository that a command reaches. `url` is checked; git reads `config` as the user's file.
    A command in the `background` runs at low priority."""

    url: str
    config: Path
    login: GitLogin = NO_LOGIN
    background: bool = False


class GitFailed(Exception):
    """Git failed, with this exit status (negative: the signal that ended it) and error text."""

    def __init__(self, status: int, stderr: str) -> None:
        super().__init__(f"git ended with {status}: {stderr}")
        self.status = status
        self.stderr = stderr


class GitTimeout(GitFailed):
    """Git did not finish before its deadline."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(-signal.SIGKILL, f"no answer within {deadline_s:g} s")


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
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        LIMITED,
        "sh",
        *(str(n) for n in (CPU_S, ADDRESS_BYTES >> 10, FILE_BYTES >> 9, PROCESSES)),
        *(GENTLY if source is not None and source.background else ()),
        "git",
        *(item for setting in _config(source) for item in ("-c", setting)),
        *arguments,
        cwd=where,
        env=_environment(source, where, objects),
        stdin=asyncio.subprocess.PIPE if send is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=CHUNK,
        start_new_session=True,
    )
    kept = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            said = await _talk(process, send, sink or _keeper(kept))
    except TimeoutError as error:
        raise GitTimeout(deadline_s) from error
    finally:
        await _end(process)
    if process.returncode:
        raise GitFailed(process.returncode, said if source is None else source.login.redact(said))
    return bytes(kept)


async def _talk(
    process: asyncio.subprocess.Process, send: bytes | None, sink: Callable[[bytes], None]
) -> str:
    """Write git's input and read its output at the same time. Returns its error text. An error in one of
    the three tasks cancels the others."""
    try:
        async with asyncio.TaskGroup() as together:
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
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(CHUNK):
                    pass
            await process.wait()


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
    """The last KEPT_ERRORS bytes of git's error text, because a hostile server can make it arbitrarily
    long."""
    assert process.stderr is not None  # noqa: S101 - it was started with one
    kept, is_cut = b"", False
    while chunk := await process.stderr.read(CHUNK):
        is_cut = is_cut or len(kept) + len(chunk) > KEPT_ERRORS
        kept = (kept + chunk)[-KEPT_ERRORS:]
    if is_cut:  # half of a secret would not be recognized
        kept = kept.partition(b"\n")[2]
    text = kept.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).strip()


def _keeper(kept: bytearray) -> Callable[[bytes], None]:
    def keep(chunk: bytes) -> None:
        if len(kept) + len(chunk) > MOST_OUTPUT:
            raise GitFailed(1, f"git answered more than {MOST_OUTPUT >> 20} MiB")
        kept.extend(chunk)

    return keep


def _config(source: GitSource | None) -> tuple[str, ...]:
    if source is None:
        return CONFIG
    plain = ("http",) if source.url.startswith("http://") else ()
    allowed = (f"protocol.{protocol}.allow=always" for protocol in (*PROTOCOLS, *plain))
    return (*CONFIG, *allowed)


def _environment(
    source: GitSource | None, where: Path | None, objects: Path | None
) -> dict[str, str]:
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
        "GIT_ASKPASS": "/bin/false",
        "GIT_SSH_COMMAND": f"{SSH} {login.ssh}".strip(),
        **login.variables,
        **({"GIT_DIR": str(where)} if where else {}),
        **({"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects / "objects")} if objects else {}),
    }


def _certificates() -> dict[str, str]:
    """The operator's certificates of servers, for a forge that no public authority signed."""
    file = os.environ.get("GIT_SSL_CAINFO") or os.environ.get("SSL_CERT_FILE")
    return {"GIT_SSL_CAINFO": file} if file else {}
