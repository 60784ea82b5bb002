"""Starts a sandbox service as a child of this process, with nothing of this process in it.

The child is a fresh program with an environment made from nothing. So it has neither the credentials nor
the memory of this process, which a fork would have.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import infra
from infra.sandbox.environments.index_relay import without_login
from infra.sandbox.environments.uv_process import PASSED as OF_UV
from infra.sandbox.environments.uv_process import PROXIES
from infra.sandbox.service.listener import READ_AHEAD
from infra.settings import packages, sandbox_limits

END_S = 25.0
"""How long a child may take to end its user code and itself, before it is killed."""

ROOT = Path(infra.__file__).resolve().parents[1]
STDERR = 2
PASSED = (
    "HEADRACE_RUNSC",
    "XDG_CACHE_HOME",
    sandbox_limits.VARIABLE,
    *packages.VARIABLES,
    *OF_UV,
)
"""The variables of ours that a child gets too. They name gVisor's program, the limits of user code, the
directories of packages, and the way to their index."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ChildService:
    """A way to reach a service: a child of this process, started for each connection."""

    name = "the sandbox service"

    def __init__(self, level: str, *, environments: Path | None = None) -> None:
        """`environments` is the directory of packages, unless HEADRACE_ENVIRONMENTS names it."""
        self._level = level
        self._environments = environments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the newest child."""
        return self._process.pid if self._process else None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start a child and connect to it. The one before, if any, is ended."""
        await self.disconnect()
        ours, theirs = socket.socketpair()
        with theirs:
            variables = make_env_vars(self._level, environments=self._environments)
            self._process = _start(theirs.fileno(), variables)
        return await asyncio.open_connection(sock=ours, limit=READ_AHEAD)

    async def disconnect(self, *, within_s: float = 0.0) -> None:
        """Wait for the end of the child, whose connection is closed, and kill it if it does not end."""
        process, self._process = self._process, None
        if process is None:
            return
        if not await _ends(process, within_s):
            process.kill()
            await _ends(process, END_S)


def _start(descriptor: int, variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a child that has this descriptor and the standard ones."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "infra.sandbox.service"),
            *("--fd", str(descriptor), "--parent", str(os.getpid())),
        ],
        cwd=ROOT,
        env=variables,
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        start_new_session=True,
    )


async def _ends(process: subprocess.Popen[bytes], within_s: float) -> bool:
    deadline = asyncio.get_running_loop().time() + within_s
    with contextlib.suppress(ChildProcessError):
        while process.poll() is None:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.01)
    return True


def make_env_vars(level: str, *, environments: Path | None = None) -> dict[str, str]:
    """Return all environment variables of a child."""
    places = {packages.DIRECTORY: str(environments)} if environments is not None else {}
    return {
        **places,
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "TMPDIR": tempfile.gettempdir(),
        "HEADRACE_SANDBOX": level,
        **{name: os.environ[name] for name in PASSED if name in os.environ},
        **_proxies(),
    }


def _proxies() -> dict[str, str]:
    """The proxies by which packages are reached. A login of one is a secret, so it stays here."""
    names = [spelling for name in PROXIES for spelling in (name, name.lower())]
    return {name: without_login(os.environ[name]) for name in names if name in os.environ}
