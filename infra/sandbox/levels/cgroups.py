"""Bounds the memory, the processes and the share of CPU of one sandbox as a whole, by a control group.

Where the kernel gives us a place for groups (version 2 if it was delegated, version 1 as root), each
sandbox gets one. Elsewhere a sandbox has the limits of its processes only.
"""

import contextlib
import logging
import os
import secrets
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from infra.sandbox.levels.level import ProcessLimits

logger = logging.getLogger(__name__)

PREFIX = "headrace-sandbox-"
NEEDED = ("memory", "pids")
SHARE_OF_MACHINE = 0.75


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where groups can be made: the directory of each controller. In version 2 all have the same one."""

    version: int
    directories: tuple[tuple[str, Path], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(path for _, path in self.directories))


class ControlGroup:
    """The group of one sandbox."""

    def __init__(self, place: GroupPlace, limits: ProcessLimits) -> None:
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        self._paths = tuple(path / name for path in place.paths)
        try:
            for path in self._paths:
                path.mkdir()
            self._limit(place, name, limits)
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Move a process into the group, with all the children that it will have."""
        for path in self._paths:
            (path / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
        """Kill all processes of the group."""
        path = self._paths[0]
        with contextlib.suppress(OSError):
            if (path / "cgroup.kill").exists():
                (path / "cgroup.kill").write_text("1")
                return
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group. Returns False when it still has processes."""
        removed = True
        for path in self._paths:
            try:
                path.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                removed = False
        return removed

    def _limit(self, place: GroupPlace, name: str, limits: ProcessLimits) -> None:
        memory = memory_bound(limits)
        for controller, directory in place.directories:
            for file, value in _values(place.version, controller, memory, limits.processes):
                _write(directory / name / file, value)


def _values(version: int, controller: str, memory: int, processes: int) -> list[tuple[str, str]]:
    if controller == "pids":
        return [("pids.max", str(processes))]
    if controller == "cpu":
        return []  # that it has a share of its own is enough, however many processes it starts
    if version == 2:
        return [
            ("memory.max", str(memory)),
            ("memory.swap.max?", "0"),
            ("memory.oom.group?", "1"),
        ]
    return [("memory.limit_in_bytes", str(memory)), ("memory.memsw.limit_in_bytes?", str(memory))]


def _write(path: Path, value: str) -> None:
    """Write a limit. One whose name ends with `?` is missing on some kernels."""
    target = path.with_name(path.name.rstrip("?"))
    if path == target or target.exists():
        target.write_text(value)


def memory_bound(limits: ProcessLimits) -> int:
    """Return how many bytes of memory a whole sandbox may use on this machine."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(limits.memory_bytes, int(machine_bytes * SHARE_OF_MACHINE))


@cache
def find_place() -> GroupPlace | None:
    """Return where this process can make groups, or None where it cannot. Removes the groups of
    processes that have ended."""
    for place in _candidates():
        try:
            _remove_former(place)
            ControlGroup(place, ProcessLimits()).remove()
        except OSError as error:
            logger.debug("no control groups at %s: %s", place.paths, error)
        else:
            return place
    return None


def _candidates() -> list[GroupPlace]:
    own = _own_directories()
    places = []
    unified = own.get("")
    if unified is not None:
        for directory in (unified, unified.parent):
            if _enable(directory):
                found = (directory / "cgroup.subtree_control").read_text().split()
                names = [name for name in (*NEEDED, "cpu") if name in found]
                places.append(GroupPlace(2, tuple((name, directory) for name in names)))
    if all(name in own for name in NEEDED):
        names = [name for name in (*NEEDED, "cpu") if name in own]
        places.append(GroupPlace(1, tuple((name, own[name]) for name in names)))
    return places


def _enable(directory: Path) -> bool:
    """Return whether groups below a directory of version 2 can bound memory and processes. Enables that
    if the kernel lets us."""
    control = directory / "cgroup.subtree_control"
    try:
        if set(NEEDED) <= set(control.read_text().split()):
            return os.access(directory, os.W_OK)
        offered = (directory / "cgroup.controllers").read_text().split()
        if not set(NEEDED) <= set(offered):
            return False
        control.write_text(" ".join(f"+{name}" for name in (*NEEDED, "cpu") if name in offered))
    except OSError:  # not ours, or a group with processes of its own, which cannot have such groups
        return False
    return True


def _own_directories() -> dict[str, Path]:
    """The directory of this process's group, by the name of the controller; "" is version 2."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = before.split(" ")[3:5]
        names = [""] if kind == "cgroup2" else options.replace(" ", ",").split(",")
        for name in names if kind in ("cgroup", "cgroup2") else []:
            if name in own:
                inside = os.path.relpath(own[name], root) if own[name].startswith(root) else "."
                found[name] = Path(os.path.normpath(Path(mount) / inside))
    return found


def _remove_former(place: GroupPlace) -> None:
    for path in place.paths:
        for former in path.glob(f"{PREFIX}*"):
            owner = former.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    former.rmdir()
