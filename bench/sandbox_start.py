"""The cost of confining user code: how long a sandbox takes to start at each level, and its memory.

`python -m bench.sandbox_start [STARTS]`. One start is everything between the request for a process and
its first message: the sandbox, the launcher, the SDK and an entry point with one empty workflow. The
levels take turns. Memory is what the sandbox's processes share with no other process.
"""

import asyncio
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import headrace
from infra.sandbox.levels.level import Level
from infra.sandbox.levels.probe import choose_level
from infra.sandbox.process import ConfinedProcess
from infra.sandbox.sandbox import code_directory

STARTS = 40
LEVELS = ("process-trusted", "bwrap")
MAIN = """
from headrace import AgentWorkflow

class Do(AgentWorkflow):
    async def run(self, ctx):
        return None
"""


async def start_once(level: Level, root: Path) -> tuple[float, float, int]:
    """Start and end one process. Returns the seconds to start and to end, and bytes of memory."""
    tree = root / "tree"
    process = ConfinedProcess(
        "workflow",
        level=level,
        sdk=root / "sdk",
        tree=tree,
        entrypoint=tree / "rollouts" / "say" / "main.py",
        env={},
    )
    began = time.perf_counter()
    await process.start()
    started = time.perf_counter()
    assert process._process is not None
    used = memory(process._process.pid)
    ending = time.perf_counter()
    await process.aclose()
    return started - began, time.perf_counter() - ending, used


def memory(pid: int) -> int:
    """The private memory of a process and its descendants in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(memory(int(child)) for child in children)


async def measure(root: Path, starts: int) -> None:
    """Print a row for each level."""
    levels = [choose_level(name) for name in LEVELS]
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in LEVELS}
    for _ in range(starts):
        for level in levels:
            taken[level.name].append(await start_once(level, root))
    print("| level | start, median | start, 90th percentile | end, median | memory |")
    print("|---|---|---|---|---|")
    for name, rows in taken.items():
        start = [row[0] * 1000 for row in rows]
        end, used = (statistics.median(row[n] for row in rows) for n in (1, 2))
        print(
            f"| `{name}` | {statistics.median(start):.1f} ms "
            f"| {statistics.quantiles(start, n=10)[8]:.1f} ms | {end * 1000:.1f} ms "
            f"| {used / 2**20:.1f} MiB |"
        )


def main() -> None:
    """Measure in a directory that the user of user code can read."""
    root, held = code_directory()
    try:
        shutil.copytree(Path(headrace.__file__).parent, root / "sdk" / "headrace")
        entrypoint = root / "tree" / "rollouts" / "say" / "main.py"
        entrypoint.parent.mkdir(parents=True)
        entrypoint.write_text(MAIN)
        asyncio.run(measure(root, int(sys.argv[1]) if len(sys.argv) > 1 else STARTS))
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(held)


if __name__ == "__main__":
    main()
