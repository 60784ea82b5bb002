"""Bounds the memory of a sandbox as a whole where the kernel offers no control group for that.

The memory of a sandbox's processes is added up again and again. A sandbox that uses up the machine's
memory between two looks is not stopped, so this is weaker than a control group. The kernel then kills
that sandbox before other processes.
"""

import asyncio
import logging
import os
from pathlib import Path

from infra.sandbox.user_process import UserProcess

logger = logging.getLogger(__name__)

LOOK_S = 0.5
MOST_PROCESSES = 4096
PAGE = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(process: UserProcess, most_bytes: int) -> None:
    """Kill a process with its descendants when they use more memory than `most_bytes`. Returns when it
    has ended."""
    while not await process.wait(within_s=LOOK_S):
        if await asyncio.to_thread(exceeds, process.pid, most_bytes):
            logger.warning(
                "a sandbox used more than %d MiB of memory and was ended", most_bytes >> 20
            )
            process.kill()


def exceeds(pid: int, most_bytes: int) -> bool:
    """Whether a process and its descendants use more memory than this. Memory that they share counts
    once."""
    pids = [pid, *_descendants(pid)]
    if sum(map(_resident_bytes, pids)) <= most_bytes:  # which counts shared memory many times
        return False
    return sum(map(_proportional_bytes, pids)) > most_bytes


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    left = [pid]
    while left and len(found) < MOST_PROCESSES:
        for place in _tasks(left.pop()):
            try:
                children = [int(child) for child in (place / "children").read_text().split()]
            except (OSError, ValueError):
                continue
            found += children
            left += children
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _proportional_bytes(pid: int) -> int:
    """The memory of a process, where each shared page counts by how many share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration, ValueError):
        return _resident_bytes(pid)
