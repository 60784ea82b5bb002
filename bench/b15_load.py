"""B15, hours under load: one large fully_async run, and small runs one after another beside it. Counts
the leases that live workers lost and the processes that ended. It ends when a small run fails or
records a sample twice.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.kit.neighbours import begin_large_run, num_waiting, prepare, stop_s, time_small_run
from tests.kit.platform import Platform, platform

LOST, ENDED = "the lease of ", " ended with exit code "


def count_in_logs(home: Path, text: str) -> int:
    """Return how many lines of the platform's logs hold a text."""
    logs = [home.with_name(f"{home.name}.up.log"), *(home / "logs").rglob("*")]
    return sum(path.read_text(errors="replace").count(text) for path in logs if path.is_file())


def step_of(running: Platform, run: str) -> int:
    return int(running.info(run)["run"]["current_step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--groups", type=int, default=64, help="of a step of the large run")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--ahead", type=int, default=16, help="steps that are requested ahead")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between small runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        with platform(home, environment={"HEADRACE_WORKERS": "two"}) as running:
            prepare(running, Path(name) / "workspace", groups=given.groups)
            workers = {worker["id"] for worker in running.get("/status")["workers"]}
            large = begin_large_run(
                running,
                groups=given.groups,
                samples=given.samples,
                ahead=given.ahead,
                steps=100_000,
            )
            end = time.monotonic() + 3600 * given.hours
            ends: list[float] = []
            while time.monotonic() < end:
                ends.append(time_small_run(running).end_s)
                print(
                    f"{len(ends)} small runs, median {statistics.median(ends):.2f} s, longest "
                    f"{max(ends):.2f} s; large run at step {step_of(running, large)}, "
                    f"{num_waiting(running)} samples wait; leases lost: {count_in_logs(home, LOST)}",
                    flush=True,
                )
                time.sleep(given.every)
            still = {worker["id"] for worker in running.get("/status")["workers"]}
            print(f"stop of the large run: {stop_s(running, large):.2f} s")
            print(
                f"workers at the start {len(workers)}, of these at the end {len(workers & still)}"
            )
            print(f"leases lost: {count_in_logs(home, LOST)}")
            print(f"processes that ended: {count_in_logs(home, ENDED)}")


if __name__ == "__main__":
    main()
