"""Runs uv as the user of user code, confined and with limits.

It sees its own program, one Python and a working directory, and it has no secret. It reads no
configuration of this machine. Its only way out is the socket of an IndexRelay, to which a relay beside
it passes what it sends.
"""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headrace import relay
from infra.sandbox.interpreter import Interpreter, is_reachable
from infra.sandbox.levels.level import ConfinedCommand, Level, ProcessLimits
from infra.sandbox.written_trees import has_file, measure_tree, remove_tree
from schemas.errors import InvalidConfig, Refused, TransientError

WITHIN_S = 900.0
MOST_FILES = 300_000
MEMORY_BYTES = 4 << 30
"""The address space of uv and of Python. uv holds the metadata of a wheel in memory, which a small file
can unpack to any size."""

LOOK_S = 0.5
END_S = 5.0
RETRIES = 3
KEPT_OUTPUT = 64 << 10
PASSED = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""The variables of the operator by which uv trusts the index."""

PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
"""The variables of the operator by which the index is reached."""

BESIDE = """
import subprocess, sys
use_as_proxy(start(gateway_socket()))
sys.exit(subprocess.call(sys.argv[1:]))
"""
"""Runs a command beside a relay, whose code comes before this."""

CHAIN = 'umask 002; "$@" && : > "$DONE"'
"""Leaves a file when a command succeeded, because a confined process reports no exit code. The next
command may run as another user of the same group."""

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class UvFailed(Exception):
    """uv ended with an error. The text is what it said. `is_away` means that the index was not
    reached."""

    def __init__(self, text: str, *, is_away: bool = False) -> None:
        super().__init__(text)
        self.is_away = is_away


@dataclass(frozen=True, slots=True)
class UvTask:
    """One command: its working directory, the only place where it may write, the Python that it gets,
    and the most bytes that it may leave in the directory. `relay` is the socket of an IndexRelay, if it
    may reach the index. `what` is for messages, and `advice` for those about a limit."""

    what: str
    folder: Path
    python: Interpreter
    most_bytes: int
    relay: Path | None = None
    within_s: float = WITHIN_S
    advice: str = "use fewer or smaller packages"


async def run_confined(level: Level, argv: Sequence[str], task: UvTask) -> str:
    """Run a command of a task and return its output. Raises UvFailed when it fails, and Refused when it
    exceeds a limit."""
    done = task.folder / "done"
    await asyncio.to_thread(remove_tree, done)
    there = (task.folder, *task.python.files)
    programs = [path for path in map(Path, argv[:1]) if not any(map(path.is_relative_to, there))]
    if task.relay is not None:
        argv = [str(task.python.path), "-I", "-S", "-c", _beside(), *argv]
    process = await level.start(
        ConfinedCommand(
            ["/bin/sh", "-c", CHAIN, "sh", *argv],
            env={**_variables(task.folder), "DONE": str(done)},
            cwd=task.folder,
            readable=(*programs, *task.python.files),
            contents=_certificates(),
            writable=(task.folder,),
            gateway=task.relay,
            limits=ProcessLimits(
                memory_bytes=MEMORY_BYTES, file_bytes=task.most_bytes, processes=512
            ),
        )
    )
    reading = asyncio.ensure_future(_read(process.output))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + task.within_s
    try:
        while not await process.wait(within_s=LOOK_S):
            size, files = await asyncio.to_thread(_measure, task)
            if size > task.most_bytes or files > MOST_FILES:
                raise _too_large(task)
            if loop.time() > deadline:
                raise Refused(f"{task.what} took longer than {task.within_s:g} s; {task.advice}")
    finally:
        is_dead = await process.end(within_s=END_S)
        if not is_dead:
            reading.cancel()
            raise TransientError(
                f"a process that installs {task.what} does not end; what it can still write is not used"
            )
        output = await reading
    if not has_file(done):
        # A file at the limit of bytes may have ended the program before it was looked at.
        size, _ = await asyncio.to_thread(_measure, task)
        if size >= task.most_bytes:
            raise _too_large(task)
        raise UvFailed(ESCAPES.sub("", output).replace(f"{task.folder}/", "").strip())
    return output


def _measure(task: UvTask) -> tuple[int, int]:
    try:
        return measure_tree(task.folder)
    except Refused as error:
        raise Refused(f"{task.what} cannot be installed: {error.message}") from error


def _too_large(task: UvTask) -> Refused:
    return Refused(
        f"{task.what} needs more than {task.most_bytes >> 20} MiB or {MOST_FILES} files; "
        f"{task.advice}"
    )


@cache
def _beside() -> str:
    """The program that runs a command beside a relay. It is a text, because the place of our code may be
    private."""
    return Path(relay.__file__).read_text() + BESIDE


def prepared_folder(directory: Path, name: str) -> Path:
    """Return a new directory in which the user of user code can write."""
    from infra.sandbox.user_process import user_group

    folder = Path(tempfile.mkdtemp(dir=directory, prefix=f"{name}-", suffix=".partial"))
    if (group := user_group()) is not None:
        os.chown(folder, -1, group)
        folder.chmod(0o770)
    return folder


def find_uv(directory: Path) -> Path:
    """Return the program uv where the user of user code can reach it: beside the environments, if it has
    to be copied. Raises InvalidConfig when it is not installed."""
    try:
        import uv

        program = Path(uv.find_uv_bin()).resolve()
    except (ImportError, FileNotFoundError) as error:
        raise InvalidConfig(
            "packages of rollouts are installed by uv, which is missing; install Headrace's dependencies"
        ) from error
    if os.geteuid() != 0 or is_reachable(program):
        return program
    told = program.stat()
    place = directory / f"uv-{told.st_size}-{told.st_mtime_ns:x}"
    if not place.is_file():
        descriptor, scratch = tempfile.mkstemp(dir=directory, suffix=".partial")
        os.close(descriptor)
        shutil.copyfile(program, scratch)
        Path(scratch).chmod(0o755)
        Path(scratch).rename(place)
    os.utime(place)
    return place


def _variables(folder: Path) -> Mapping[str, str]:
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    lower = {name: os.environ[name] for n in PASSED if (name := n.lower()) in os.environ}
    return {
        **passed,
        **lower,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "UV_CACHE_DIR": str(folder / "cache"),
        "NO_PROXY": "",
        "no_proxy": "",
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "UV_HTTP_RETRIES": str(RETRIES),
        "UV_CONCURRENT_DOWNLOADS": "8",
    }


def _certificates() -> dict[Path, bytes]:
    """The certificates that the operator trusts, which may lie in a private directory. A file that
    cannot be read is left to uv to report."""
    path = Path(os.environ.get("SSL_CERT_FILE") or "/")
    try:
        return {path: path.read_bytes()}
    except OSError:
        return {}


async def _read(descriptor: int) -> str:
    """Read an output to its end and return its beginning."""
    reader = asyncio.StreamReader(limit=1 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    kept = bytearray()
    try:
        while chunk := await reader.read(1 << 16):
            kept += chunk[: KEPT_OUTPUT - len(kept)]
    finally:
        transport.close()
    return kept.decode(errors="replace")
