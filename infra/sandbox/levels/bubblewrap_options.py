"""The options of bubblewrap for one confined command, and the small files that it reads from us.

They reach bubblewrap through a pipe, because anybody can read the arguments of a process and the
options hold the command's variables.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infra.sandbox.levels.level import (
    GATEWAY_SOCKET,
    GATEWAY_VARIABLE,
    ConfinedCommand,
    ProcessLimits,
)
from infra.sandbox.levels.seccomp import compile_filter

USER = 1000
"""The user and group inside. Outside they are the ones that bubblewrap was started as."""

NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--disable-userns"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
    *("--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"),
)
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories of programs and libraries besides /usr. Most systems have links to /usr in their place."""

ETC = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
    "/etc/mime.types",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/pki/ca-trust/extracted",
    "/etc/crypto-policies",
)
"""The files of /etc that Python and TLS read. No other file of it can be read inside."""

NETWORK = ("/etc/resolv.conf", "/etc/hosts")
"""The files that a command with a network reads too."""

DEVICES = ("null", "zero", "full", "random", "urandom")

TEMPORARY, SHARED = "/tmp", "/dev/shm"  # noqa: S108 - a sandbox's own

FILES = {
    "/etc/passwd": f"user:x:{USER}:{USER}:user:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": f"user:x:{USER}:\nnogroup:x:65534:\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
ALONE = {"/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n"}
"""Files of ours that a command finds, and those of a command without a network."""


@dataclass(frozen=True, slots=True)
class BubblewrapOptions:
    """The options, and the descriptors that bubblewrap inherits for them."""

    arguments: tuple[str, ...]
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BubblewrapPlan:
    """One start of bubblewrap: its options, the command line inside, and the limits of its processes."""

    options: BubblewrapOptions
    argv: tuple[str, ...]
    limits: ProcessLimits


def build(command: ConfinedCommand, held: ExitStack, *, counted: bool) -> BubblewrapOptions:
    """Return the options for a command. `held` closes the descriptors. Memory that belongs to no process
    may be made only where it is `counted`."""
    descriptors: list[int] = []

    def keep(content: bytes) -> str:
        descriptors.append(memory_file(content))
        held.callback(os.close, descriptors[-1])
        return str(descriptors[-1])

    texts = FILES if command.network else {**FILES, **ALONE}
    contents = {path: text.encode() for path, text in texts.items()}
    contents |= {str(path): content for path, content in command.contents.items()}
    gateway = {GATEWAY_VARIABLE: str(GATEWAY_SOCKET)} if command.gateway else {}
    arguments = (
        *NAMESPACES,
        *(("--share-net",) if command.network else ()),
        *_system(network=command.network),
        *_devices(),
        *_writable(command),
        *(a for path, content in contents.items() for a in ("--ro-bind-data", keep(content), path)),
        *_mount_files(command),
        *("--seccomp", keep(compile_filter(uncounted_memory=counted))),
        *("--remount-ro", "/", "--chdir", str(command.cwd)),
        *(a for n, value in {**command.env, **gateway}.items() for a in ("--setenv", n, value)),
    )
    return BubblewrapOptions(arguments, tuple(descriptors))


def _system(*, network: bool) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in (*ETC, *(NETWORK if network else ())):
        if Path(name).exists():
            yield from ("--ro-bind", name, name)
    yield from ("--proc", "/proc")


def _devices() -> Iterator[str]:
    yield from ("--perms", "0755", "--dir", "/dev")
    for name in DEVICES:
        yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    links = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
    for name, place in links.items():
        yield from ("--symlink", f"/proc/self/fd{place}", f"/dev/{name}")


def _writable(command: ConfinedCommand) -> Iterator[str]:
    """The only places to write, which together have the size `written_bytes`. Shared memory is in /tmp
    too, unless files that were given lie where it belongs."""
    given = (*command.readable, *command.writable)
    if any(path.is_relative_to(SHARED) for path in given):
        half = str(command.limits.written_bytes // 2)
        for place in (TEMPORARY, SHARED):
            yield from ("--size", half, "--perms", "0700", "--tmpfs", place)
    else:
        size = str(command.limits.written_bytes)
        yield from ("--size", size, "--perms", "0700", "--tmpfs", TEMPORARY)
        yield from ("--symlink", TEMPORARY, SHARED)


def _mount_files(command: ConfinedCommand) -> Iterator[str]:
    """Mount the files of the command, upper directories first. Those in /usr are there already."""
    writable = set(command.writable)
    for path in sorted({*command.readable, *writable}):
        if path in writable:
            yield from ("--bind", str(path), str(path))
        elif not path.is_relative_to("/usr"):
            yield from ("--ro-bind", str(path), str(path))
    if command.gateway is not None:
        yield from ("--perms", "0755", "--dir", str(GATEWAY_SOCKET.parent))
        yield from ("--ro-bind", str(command.gateway), str(GATEWAY_SOCKET))


def encode(arguments: Sequence[str]) -> bytes:
    """Return the arguments as bubblewrap reads them. Raises ValueError for a NUL character."""
    if any("\0" in argument for argument in arguments):
        raise ValueError("a path or a variable holds a NUL character; remove it")
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def memory_file(content: bytes) -> int:
    """Return a descriptor of an anonymous file with this content, at its begin."""
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
