"""The options of bubblewrap and of runsc for one command that gVisor confines.

Bubblewrap makes the namespaces and the tree of files, which holds nothing else of this machine. In
them runs runsc, and the command runs on the kernel that runsc is. The bundle that runsc reads lies in
memory that only these namespaces see. So it is gone with them, and the command's variables, which are
part of it, reach no disk.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from infra.sandbox.levels.bubblewrap_options import (
    ALONE,
    DEVICES,
    ETC,
    FILES,
    SYSTEM,
    BubblewrapOptions,
    BubblewrapPlan,
    memory_file,
)
from infra.sandbox.levels.level import (
    GATEWAY_SOCKET,
    GATEWAY_VARIABLE,
    ConfinedCommand,
    ProcessLimits,
)

HOME = Path("/run/headrace")
"""Where runsc finds its program, its state and its bundle."""

RUNSC, BUNDLE, STATE, GIVEN = HOME / "runsc", HOME / "bundle", HOME / "state", HOME / "given"
ROOT = BUNDLE / "rootfs"
NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"),
    # runsc asks for the rights of root, which it has in these namespaces only.
    *("--uid", "0", "--gid", "0", "--cap-add", "ALL", "--hostname", "sandbox"),
)
FLAGS = (
    f"--root={STATE}",
    "--rootless",
    "--platform=systrap",
    "--network=none",
    "--ignore-cgroups",
    "--host-settings=ignore",
    "--host-uds=open",
    "--overlay2=none",
)
OWN = tuple(map(Path, ("/tmp", "/dev", "/proc", "/sys")))  # noqa: S108 - a sandbox's own
"""The places where a sandbox has file systems of its own. What is given below them is mounted."""

ADDED_PROCESSES = 256
"""How many threads runsc may have besides those of the command's processes."""

UNBOUNDED = 1 << 60


def plan_gvisor(runsc: Path, command: ConfinedCommand, held: ExitStack) -> BubblewrapPlan:
    """Return what bubblewrap starts for a command. The limits are those of runsc itself, which reserves
    much more memory than it uses. `held` closes the descriptors."""
    descriptors: list[int] = []

    def keep(content: bytes) -> str:
        descriptors.append(memory_file(content))
        held.callback(os.close, descriptors[-1])
        return str(descriptors[-1])

    mounted = [p for p in sorted({*command.readable}) if any(p.is_relative_to(o) for o in OWN)]
    config = json.dumps(_config(command, mounted)).encode()
    arguments = (
        *NAMESPACES,
        *("--proc", "/proc", "--perms", "0755", "--dir", "/dev"),
        *(a for name in DEVICES for a in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--tmpfs", "/tmp", "--tmpfs", "/run"),  # noqa: S108 - where runsc mounts its root
        *("--ro-bind", str(runsc), str(RUNSC), "--dir", str(STATE)),
        *_root(),
        *(a for o in OWN for a in ("--dir", f"{ROOT}{o}")),
        *_bind_given(command, mounted),
        *(
            a
            for path, text in {**FILES, **ALONE}.items()
            for a in _file(keep, f"{ROOT}{path}", text)
        ),
        *("--file", keep(config), str(BUNDLE / "config.json")),
        *("--chdir", str(BUNDLE)),
    )
    passed = (f"--pass-fd={number}:{number}" for number in command.pass_fds)
    argv = (str(RUNSC), *FLAGS, "run", *passed, f"--bundle={BUNDLE}", "sandbox")
    limits = ProcessLimits(
        memory_bytes=UNBOUNDED,
        file_bytes=UNBOUNDED,
        processes=command.limits.processes + ADDED_PROCESSES,
        files=UNBOUNDED,
    )
    return BubblewrapPlan(BubblewrapOptions(arguments, tuple(descriptors)), argv, limits)


def _root() -> Iterator[str]:
    """The system's programs, at their places below the root of the sandbox."""
    yield from ("--ro-bind", "/usr", f"{ROOT}/usr")
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), f"{ROOT}{path}")
        elif path.is_dir():
            yield from ("--ro-bind", str(path), f"{ROOT}{path}")
    yield from ("--perms", "0755", "--dir", f"{ROOT}/etc")
    for name in ETC:
        if Path(name).exists():
            yield from ("--ro-bind", name, f"{ROOT}{name}")


def _bind_given(command: ConfinedCommand, mounted: list[Path]) -> Iterator[str]:
    for path in sorted({*command.readable}):
        if path in mounted:
            yield from ("--ro-bind", str(path), str(_source(path, mounted)))
        elif not path.is_relative_to("/usr"):
            yield from ("--ro-bind", str(path), f"{ROOT}{path}")
    if command.gateway is not None:
        yield from ("--ro-bind", str(command.gateway), f"{ROOT}{GATEWAY_SOCKET}")


def _source(path: Path, mounted: list[Path]) -> Path:
    return GIVEN / str(mounted.index(path))


def _file(keep: Callable[[bytes], str], path: str, text: str) -> tuple[str, ...]:
    return ("--perms", "0644", "--file", keep(text.encode()), path)


def _config(command: ConfinedCommand, mounted: list[Path]) -> dict[str, object]:
    """The bundle's configuration, as the Open Container Initiative defines it. The command's user is
    number 0, which owns what our user owns outside, and has no capability."""
    gateway = {GATEWAY_VARIABLE: str(GATEWAY_SOCKET)} if command.gateway else {}
    limits = command.limits
    sizes = {
        "RLIMIT_CORE": 0,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_NPROC": limits.processes,
    }
    half = limits.written_bytes // 2
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(command.argv),
            "env": [f"{name}={value}" for name, value in {**command.env, **gateway}.items()],
            "cwd": str(command.cwd),
            "noNewPrivileges": True,
            "capabilities": {},
            "rlimits": [{"type": name, "soft": n, "hard": n} for name, n in sizes.items()],
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"type": "proc", "destination": "/proc", "source": "proc"},
            *(_tmpfs(place, half) for place in ("/tmp", "/dev/shm")),  # noqa: S108 - its own
            *(_bind(path, _source(path, mounted)) for path in mounted),
        ],
        "linux": {"namespaces": [{"type": t} for t in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _tmpfs(place: str, size: int) -> dict[str, object]:
    options = ["nosuid", "nodev", f"size={size}", "mode=1777"]
    return {"type": "tmpfs", "destination": place, "source": "tmpfs", "options": options}


def _bind(path: Path, source: Path) -> dict[str, object]:
    return {
        "type": "bind",
        "destination": str(path),
        "source": str(source),
        "options": ["ro", "rbind"],
    }
