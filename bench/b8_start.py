"""B8, cold start and idle cost: `headrace --help`, `headrace up` until ready, submit until the first
sample and the first step on a warm worker, and the resources that the idle platform uses.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tests.kit.platform import ROOT, make_workspace, platform, run_config

HEAVY = ("torch", "asyncpg", "aiokafka", "pydantic", "httpx")


def help_cpu(times: int = 9) -> list[float]:
    """CPU seconds of `headrace --help`, whole process."""
    used = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "producers.cli.main", "--help"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return used


def help_imports() -> list[str]:
    """Which heavy modules `headrace --help` imports."""
    code = (
        "import sys; sys.argv=['headrace','--help']\n"
        "from producers.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print('IMPORTED', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode().rsplit("IMPORTED ", 1)[1].strip().strip("[]").split(", ")


def tree(root: int) -> list[int]:
    """The pids of a process and all below it."""
    found = [root]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == root:
                found += tree(int(entry.name))
    return found


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cpu_s(pids: list[int]) -> float:
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def shown(pids: list[int]) -> Iterator[tuple[str, float]]:
    for pid in pids:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for name in ("producers.serve", "consumers", "producers.cli.main up", "postgres"):
            if name in line:
                yield name, pss_mb(pid)
                break


def main() -> None:
    print(f"B8 cold start and rest, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(
        f"headrace --help                 {statistics.median(help_cpu()):8.3f} s CPU (median of 9)"
    )
    print(f"heavy modules it imports        {help_imports()}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        workspace = make_workspace(root / "workspace")
        start = time.monotonic()
        with platform(root / "home") as running:
            print(f"headrace up to ready            {time.monotonic() - start:8.2f} s")
            running.post("/workspaces", {"url": str(workspace), "name": "w"})
            running.upload("numbers")
            warm = run_config(advanced={"max_steps": 2, "deterministic": False})
            running.wait(running.submit(warm, workspace="w"), "finished")
            run = running.submit(warm, workspace="w")
            running.wait(run, "finished")
            at = {}
            for event in running.events(run):
                at.setdefault(event["type"], datetime.fromisoformat(event["time"]))
            asked = at["rl.run.requested"]
            for name, kind in (("sample", "rl.sample.generated"), ("step", "rl.policy.updated")):
                print(f"submit to the first {name:12}{(at[kind] - asked).total_seconds():8.2f} s")
            time.sleep(5)
            pids = tree(running.process.pid)
            before, since = cpu_s(pids), time.monotonic()
            time.sleep(20)
            share = (cpu_s(pids) - before) / (time.monotonic() - since)
            print(f"idle platform                   {share * 100:8.2f} % of a core")
            sums: dict[str, float] = {}
            for name, mb in shown(pids):
                sums[name] = sums.get(name, 0.0) + mb
            for name, mb in sums.items():
                print(f"    {name:28}{mb:8.0f} MB PSS")
            print(f"everything                      {sum(pss_mb(p) for p in pids):8.0f} MB PSS")


if __name__ == "__main__":
    main()
