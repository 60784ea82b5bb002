"""Processes of a running platform: which kinds there are, their death, and their sleep."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from infra.operations.local.embedded_postgres import place_of
from infra.operations.local.home import read_state
from tests.kit.platform import Platform, eventually
from tests.stack.components import Components

CONTROL = "control"
GIT = "git"
CAUGHT_S = 3.0
"""So long a kill waits for a process of a short-lived kind."""

AUXILIARY = (
    *("checkpointer", "background writer", "walwriter", "autovacuum", "logical replication"),
    *("io worker", "startup", "logger", "archiver", "stats"),
)


@dataclass(frozen=True, slots=True)
class Processes:
    """Where the processes of one trial are found: the platforms, and the components that they work on
    (None: the first platform's embedded database)."""

    platforms: Sequence[Platform]
    components: Components | None = None

    def of(self, target: str) -> list[int]:
        """The processes that `target` names now; none while they are being restarted."""
        if target == "postmaster":
            return self._postmaster()
        if target == "broker":
            broker = self.components.kafka.process if self.components else None
            return [broker.pid] if broker and broker.poll() is None else []
        if target == "backend":
            return [pid for pid in self._servers() if _is_backend(pid)]
        if target == "auxiliary":
            return self._auxiliary()
        return [pid for platform in self.platforms for pid in pids(platform, target)]

    def stopped_together(self, target: str, draw: random.Random) -> list[int]:
        """The processes that one SIGSTOP of `target` means: one of its kind, or the whole database."""
        if target == "database":
            return [*self._postmaster(), *self._servers()]
        found = self.of(target)
        return [draw.choice(found)] if found else []

    def database_log(self) -> Path | None:
        """The answer of the database server."""
        if self.components is not None:
            return self.components.postgres.log
        data = self._data()
        return data.parent / "postgres.log" if data else None

    def _data(self) -> Path | None:
        if self.components is not None:
            return self.components.postgres.data
        place = place_of(self.platforms[0].home)
        return place.data if place else None

    def _postmaster(self) -> list[int]:
        data = self._data()
        try:
            pid = int((data / "postmaster.pid").read_text().split()[0]) if data else 0
        except (OSError, ValueError, IndexError):
            return []
        return [pid] if pid and psutil.pid_exists(pid) else []

    def _auxiliary(self) -> list[int]:
        """None while the server recovers from a crash: PostgreSQL 18 does not notice that its startup
        process died then, and never answers again."""
        servers = self._servers()
        if any("startup" in _said(pid) for pid in servers):
            return []
        return [pid for pid in servers if not _is_backend(pid)]

    def _servers(self) -> list[int]:
        return [pid for postmaster in self._postmaster() for pid in _children(postmaster)]


def pids(started: Platform, target: str) -> list[int]:
    """The processes of one platform that `target` names now."""
    if target == "supervisor":
        return [started.process.pid]
    if target == "forkserver":
        return [
            p for p in _children(started.process.pid) if "consumers.process.fork_server" in _said(p)
        ]
    state = read_state(started.home)
    if state is None:
        return []
    children = [child for child in state.children if child.pid is not None]
    controls = [c.pid for c in children if c.name == CONTROL and c.pid]
    if target == CONTROL:
        return controls
    if target in (GIT, "discover"):
        below = [pid for control in controls for pid in _below(control)]
        return [pid for pid in below if _is_git(pid) == (target == GIT) and not _waits(pid)]
    workers = [c.pid for c in children if c.name not in (CONTROL, "serving") and c.pid]
    return workers if target == "worker" else [pid for w in workers for pid in _below(w)]


def user_pids(started: Platform, words: str) -> list[int]:
    """The processes of user code whose command line has these words, the innermost ones first. The
    program that confines them has the words too."""
    found = [pid for pid in pids(started, "user") if words in _said(pid)]
    return sorted(found, reverse=True)


def kill(found: Processes | Platform, target: str, draw: random.Random) -> str | None:
    """`kill -9` of one process of the target; what died, or None when there was none."""
    processes = found if isinstance(found, Processes) else Processes([found])
    candidates = processes.of(target)
    if not candidates:
        return None
    return killed(draw.choice(candidates), target)


def killed(pid: int, target: str) -> str | None:
    """`kill -9` of this process; None when it was gone already."""
    name = f"{_called(pid)} {' '.join(_said(pid).split()[-6:])[:80]}"
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return f"{target} {pid}: {name}"


def kill_after_steps(started: Platform, run: str, targets: Mapping[int, str]) -> None:
    """`kill -9` of a process after each of these steps of a run, while it makes the rollouts of the next
    one: of a worker, or of the user code whose command line has the words of the target."""
    for step, target in targets.items():
        eventually(partial(_is_at, started, run, step), within_s=120, what=f"step {step}")
        time.sleep(0.2)
        found = eventually(partial(_candidates, started, target), within_s=60, what=target)
        assert killed(found[0], target), f"{target} ended by itself"


def _is_at(started: Platform, run: str, step: int) -> bool | None:
    return (started.info(run)["run"]["current_step"] or 0) >= step or None


def _candidates(started: Platform, target: str) -> list[int] | None:
    return (pids(started, target) if target == "worker" else user_pids(started, target)) or None


def caught(processes: Processes, target: str, draw: random.Random) -> str | None:
    """Wait for a process of a short-lived kind and kill it, at a random moment of its life."""
    deadline = time.monotonic() + CAUGHT_S
    while time.monotonic() < deadline:
        if candidates := processes.of(target):
            time.sleep(draw.uniform(0.0, 0.15))
            # Whoever came later is as good: what matters is that one dies in the middle of its work.
            again = processes.of(target) or candidates
            if died := killed(draw.choice(again), target):
                return died
        time.sleep(0.003)
    return None


def signalled(pids: Sequence[int], number: signal.Signals) -> list[int]:
    """Send a signal to processes. Returns those that were there."""
    there = []
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        there.append(pid)
    return there


def _below(pid: int) -> list[int]:
    """All descendants, read straight from the kernel: short-lived ones are gone soon."""
    return list(_walk(pid, _children))


def _walk(pid: int, children: Callable[[int], list[int]]) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _walk(child, children)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass  # it ended
    return found


def _said(pid: int) -> str:
    """Its command line; empty when it is gone."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def _called(pid: int) -> str:
    """The name that it gave itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _is_git(pid: int) -> bool:
    """Whether it is git, or the wrapper that tests put before it."""
    words = _said(pid).split()
    return any(Path(word).name.startswith("git") for word in words[:2])


def _waits(pid: int) -> bool:
    """Whether it is what the wrapper waits with before it becomes git."""
    return _said(pid).startswith("sleep")


def _is_backend(pid: int) -> bool:
    """Whether a process of the database server serves a connection."""
    return not any(name in _said(pid) for name in AUXILIARY)
