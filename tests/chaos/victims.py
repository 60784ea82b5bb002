"""Processes of a running platform, and their death."""

import os
import random
import signal

import psutil

from infra.home import read_state
from tests.kit.platform import Platform

CONTROL = "control"


def pids(started: Platform, target: str) -> list[int]:
    """The processes that `target` names now; none while they are being restarted."""
    if target == "supervisor":
        return [started.process.pid]
    state = read_state(started.home)
    if state is None:
        return []
    children = [child for child in state.children if child.pid is not None]
    if target == CONTROL:
        return [c.pid for c in children if c.name == CONTROL and c.pid]
    workers = [c.pid for c in children if c.name != CONTROL and c.pid]
    return workers if target == "worker" else [pid for w in workers for pid in _below(w)]


def _below(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(started: Platform, target: str, draw: random.Random) -> str | None:
    """`kill -9` of one process of the target; what died, or None when there was none."""
    candidates = pids(started, target)
    if not candidates:
        return None
    pid = draw.choice(candidates)
    try:
        name = " ".join(psutil.Process(pid).cmdline()[-6:])[:80]
        os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return f"{target} {pid}: {name}"
