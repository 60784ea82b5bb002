"""A level says how strongly user code is confined. Each level is one module of this folder.

A caller names the command, the files that it may read and the socket by which it reaches the gateway.
Everything else of the machine is out of its reach, as far as the level promises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infra.sandbox.user_process import UserProcess
from infra.settings.sandbox_limits import SandboxLimits

DEFAULT = SandboxLimits()

GATEWAY_SOCKET = Path("/run/headrace/gateway.sock")
"""Where a confined process finds the socket of its gateway, if its level gives it files of its own."""

GATEWAY_VARIABLE = "HEADRACE_GATEWAY_SOCKET"
"""The variable that names the socket of its gateway to a confined process. Every level sets it."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of one confined command: bytes of memory, of one file and of all files that it writes,
    and the numbers of processes and of open files."""

    memory_bytes: int = DEFAULT.memory_bytes
    file_bytes: int = DEFAULT.written_bytes // 2
    written_bytes: int = DEFAULT.written_bytes
    processes: int = DEFAULT.processes
    files: int = 4096

    @classmethod
    def of_user_code(cls, limits: SandboxLimits) -> "ProcessLimits":
        """The limits of a process of user code. One file may have half of what all have together."""
        return cls(
            memory_bytes=limits.memory_bytes,
            file_bytes=limits.written_bytes // 2,
            written_bytes=limits.written_bytes,
            processes=limits.processes,
        )


@dataclass(frozen=True, slots=True)
class ConfinedCommand:
    """A command to start. `readable` are files and directories that it may read, at the same paths
    inside. `contents` are small files that only we can read, and that it gets with this content. It
    may write only below its own /tmp, which begins empty, and in `writable`. `pass_fds` stay open in
    it. `gateway` is the socket that GATEWAY_VARIABLE names in it. Without that and without `network`
    there is no way out."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    readable: tuple[Path, ...] = ()
    contents: Mapping[Path, bytes] = field(default_factory=dict)
    writable: tuple[Path, ...] = ()
    pass_fds: tuple[int, ...] = ()
    gateway: Path | None = None
    network: bool = False
    limits: ProcessLimits = field(default_factory=ProcessLimits)


class Level(Protocol):
    """One way to confine a command."""

    @property
    def name(self) -> str:
        """The level's name in HEADRACE_SANDBOX."""
        ...

    async def start(self, command: ConfinedCommand) -> UserProcess:
        """Start a command. Its limits hold before its first instruction. Raises InvalidConfig when this
        machine cannot confine it, and OSError when the command cannot be started."""
        ...

    async def aclose(self) -> None:
        """End everything that this level started or keeps ready."""
        ...
