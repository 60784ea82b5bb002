"""B5, push to first sample: how long after a push its run has its first sample, hop by hop.

A local bare repository is pushed to, and its webhook is delivered at once, as a forge does. The worker
is warm: earlier runs have loaded its base model. `first sample` is the first sample of the run that is
recorded whole, so it is later than its first token. Times are those of the events, by one clock.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg

from infra.operations.local import embedded_postgres
from producers.cli.demo.post_receive import deliver
from tests.kit.platform import git, platform
from tests.kit.pushed_workspace import PushedWorkspace, commit, make_bare, make_clone

MOST_P50_S, MOST_P99_S = 1.0, 2.0
HOPS = (
    ("webhook durable", "rl.workspace.push-received"),
    ("ref moved", "rl.workspace.refs-moved"),
    ("triggers read", "rl.trigger.push-examined"),
    ("run requested", "rl.run.requested"),
    ("commit synced", "rl.workspace.synced"),
    ("run started", "rl.run.started"),
    ("policy ready", "rl.policy.initialized"),
    ("groups requested", "rl.groups.requested"),
    ("first sample", "rl.sample.generated"),
)
QUERY = """
select min(time) from events
where type = $1 and time >= $2 and ($3::text is null or run_id = $3 or data::text like '%' || $3 || '%')
"""


async def hop_times(home: Path, run: str, began: datetime) -> list[float]:
    """Seconds from the delivery to each hop of one run."""
    connection = await asyncpg.connect(embedded_postgres.place_for(home).url)
    try:
        found = []
        for _, kind in HOPS:
            of_run = kind.startswith(("rl.run.", "rl.policy.", "rl.groups.", "rl.sample."))
            of_run = of_run or kind == "rl.workspace.synced"
            at: Any = await connection.fetchval(QUERY, kind, began, run if of_run else None)
            found.append((at - began).total_seconds())
        return found
    finally:
        await connection.close()


def measure(root: Path, *, pushes: int, warm: int) -> list[list[float]]:
    """The times of each hop, one row for each push."""
    clone = make_clone(root / "clone")
    bare = make_bare(clone, root / "math.git")
    rows = []
    with platform(root / "home") as started:
        started.upload("numbers")
        workspace = PushedWorkspace.connect(started, str(bare), name="math", forge="none")
        before = git(clone, "rev-parse", "HEAD")
        for number in range(warm + pushes):
            sha = commit(clone, {"note": str(number)})
            git(clone, "push", "-q", "origin", "main")
            began = datetime.now(UTC)
            deliver(workspace.hook["url"], workspace.hook["secret"], before, sha, "refs/heads/main")
            run = workspace.wait_for_run(sha)["run"]
            started.wait(run, "finished")
            if number >= warm:
                rows.append(asyncio.run(hop_times(root / "home", run, began)))
            before = sha
    return rows


def at(rows: Sequence[Sequence[float]], hop: int, part: float) -> float:
    times = sorted(row[hop] for row in rows)
    return times[min(len(times) - 1, int(len(times) * part))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--warm", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-b5-") as folder:
        rows = measure(Path(folder), pushes=options.pushes, warm=options.warm)
    print(f"{len(rows)} pushes; seconds after the delivery begins")
    print(f"{'hop':18} {'p50':>7} {'p99':>7}")
    for hop, (name, _) in enumerate(HOPS):
        p50 = statistics.median(row[hop] for row in rows)
        print(f"{name:18} {p50:7.3f} {at(rows, hop, 0.99):7.3f}")
    print(f"targets            {MOST_P50_S:7.1f} {MOST_P99_S:7.1f}")


if __name__ == "__main__":
    sys.exit(main())
