"""Runs git inside of bubblewrap: it sees its own mirror, the system's programs and its login, and
nothing else of this machine.

A command that reaches a repository may write to its mirror and has the network. A command that reads a
mirror has neither. Repositories that are directories of this machine are read without a sandbox, because
they may lie anywhere, and the operator allows them.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infra.repositories.git.login import NO_LOGIN, GitLogin
from infra.repositories.git.urls import Protocol
from infra.sandbox.levels.bubblewrap_options import build, encode
from infra.sandbox.levels.level import ConfinedCommand, ProcessLimits
from infra.sandbox.levels.probe import find_bubblewrap
from schemas.errors import InvalidConfig

logger = logging.getLogger(__name__)

INSIDE_HOME = "/tmp"  # noqa: S108 - the sandbox's own
SYSTEM_SSH = ("/etc/ssh/ssh_config", "/etc/ssh/ssh_config.d", "/etc/ssh/ssh_known_hosts")
TEMPORARY_BYTES = 64 << 20

READ_ONLY = ("--remount-ro", "/proc")
"""Mirrors belong to our user, so git keeps that user outside of the sandbox. If it is root, it owns the
files below /proc/sys, and needs no capability to write to them."""


@dataclass(frozen=True, slots=True)
class GitFiles:
    """The files of one command: what it may write to, what it may read, and how it logs in. Without a
    `protocol` it reaches no repository."""

    writable: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()
    protocol: Protocol | None = None
    login: GitLogin = NO_LOGIN


class GitConfinement:
    """Wraps commands of git into bubblewrap, the program at `program`."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def wrap(
        self,
        argv: Sequence[str],
        held: ExitStack,
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        files: GitFiles,
    ) -> tuple[list[str], tuple[int, ...]]:
        """Return the command line, and the descriptors that it inherits. `held` closes them."""
        is_ssh = files.protocol == "ssh"
        readable = (*files.readable, *files.login.files, *(_ssh_files(env) if is_ssh else ()))
        command = ConfinedCommand(
            argv=argv,
            env={**env, "HOME": INSIDE_HOME},
            cwd=cwd or Path("/"),
            readable=tuple(path for path in readable if path.exists()),
            contents=_certificates(env),
            writable=files.writable,
            network=files.protocol is not None,
            limits=ProcessLimits(written_bytes=TEMPORARY_BYTES),
        )
        options = build(command, held, counted=False)
        arguments = (*options.arguments, *READ_ONLY, *(_own_ssh(env) if is_ssh else ()))
        descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
        held.callback(os.close, descriptor)
        os.write(descriptor, encode(arguments))
        os.lseek(descriptor, 0, os.SEEK_SET)
        line = [str(self._program), "--args", str(descriptor), "--", *argv]
        return line, (descriptor, *options.descriptors)


def _certificates(env: Mapping[str, str]) -> dict[Path, bytes]:
    """The certificates that the operator trusts. Their directory may be one that root alone can pass,
    and root has no such right inside. A file that cannot be read is left to git to report."""
    path = Path(env.get("GIT_SSL_CAINFO") or "/")
    try:
        return {path: path.read_bytes()}
    except OSError:
        return {}


def _ssh_files(env: Mapping[str, str]) -> Iterator[Path]:
    yield from map(Path, SYSTEM_SSH)
    if agent := env.get("SSH_AUTH_SOCK"):
        yield Path(agent)


def _own_ssh(env: Mapping[str, str]) -> tuple[str, ...]:
    """The user's `~/.ssh`, where ssh looks for it inside."""
    own = Path(env["HOME"]) / ".ssh"
    return ("--ro-bind", str(own), f"{INSIDE_HOME}/.ssh") if own.is_dir() else ()


def find_confinement(level: str) -> GitConfinement | None:
    """Return the confinement of git at a level of HEADRACE_SANDBOX. None where bubblewrap does not work:
    git then has its limits only, and a warning says so."""
    if level == "process-trusted":
        return None
    try:
        return GitConfinement(find_bubblewrap())
    except InvalidConfig as error:
        logger.warning("git runs without a sandbox: %s", error)
        return None
