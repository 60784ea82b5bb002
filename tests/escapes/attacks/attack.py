"""The form of an attack. An attack is a function that user code calls inside its sandbox. The harness
looks outside for its effects.

This file and its neighbours are copied into a rollout, so they import nothing but the standard library
and each other.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Loot = str | bytes | None
"""What an attack found. The harness searches it for the secrets of its canaries. A line that begins with
CLAIM says that the attack did something of which the loot is the only trace."""

CLAIM = "CLAIM "
MOST_LOOT = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Targets:
    """What an attack knows about the outside. `token` is part of every name that an attack makes.
    `mark` is how each secret begins."""

    token: str
    mark: str
    victim: int
    address: int
    length: int
    parent: int
    outside: str
    home: str
    socket: str
    abstract: str
    tcp: int
    udp: int
    addresses: list[str]
    shm_key: int
    shm_name: str
    terminal: str
    temporary: str
    neighbour_tree: str
    own_ports: list[int]
    other_path: str
    other_key: str

    def name(self, attack: str) -> str:
        """A name that shows which attack made it."""
        return f"escape-{self.token}-{attack}"

    def marks(self, data: bytes | str) -> str:
        """The secrets in some data, one per line."""
        raw = data.encode(errors="replace") if isinstance(data, str) else data
        found = {m.decode() for m in re.findall(self.mark.encode() + b"[0-9a-f]{16}", raw)}
        return "\n".join(sorted(found))


Run = Callable[[Targets], Loot]


@dataclass(frozen=True)
class Attack:
    """One attack. Its name is its function's, its family the module's, and `tries` its docstring.

    `in_child` attacks run in a forked child of the process that hosts user code. `is_safe` ones may also
    run without a sandbox on a machine that others use, because they touch only canaries."""

    name: str
    family: str
    tries: str
    run: Run
    in_child: bool
    is_safe: bool


ATTACKS: dict[str, Attack] = {}


def attack(*, in_child: bool = True, is_safe: bool = True) -> Callable[[Run], Run]:
    """Add a function to the corpus."""

    def add(run: Run) -> Run:
        name = run.__name__
        family = run.__module__.rpartition(".")[2]
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, family, run.__doc__ or "", run, in_child, is_safe)
        return run

    return add


def claim(text: str) -> str:
    return f"{CLAIM}{text}\n"


def call(number: int, *arguments: Any) -> int:
    """A system call by its number. Raises OSError."""
    result = int(libc.syscall(ctypes.c_long(number), *(_long(a) for a in arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _long(argument: Any) -> Any:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def read(path: str, size: int = 1 << 16) -> bytes:
    """The beginning of a file, or nothing. Does not wait."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, size)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def write(path: str, data: str, *, flags: int = os.O_CREAT) -> bool:
    """Whether a file could be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    except OSError:
        return False
    try:
        return os.write(descriptor, data.encode()) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def pids() -> list[int]:
    """The processes that can be seen, without this one."""
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) != os.getpid()]


SLEEP = """import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(30)
"""


def remain(name: str) -> None:
    """Become a process that ignores signals and sleeps for 30 s. Its command line holds `name`."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, 4096)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", SLEEP, name])


def output_of(*argv: str, env: Mapping[str, str] | None = None) -> str:
    """The output of a program, or nothing when it cannot be run."""
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=4, stdin=subprocess.DEVNULL, env=env, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout + done.stderr).decode(errors="replace")
