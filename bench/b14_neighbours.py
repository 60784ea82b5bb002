"""B14, a small run beside a large one: the first sample and the end of a run of two steps, alone and
beside a fully_async run whose samples wait by the thousand, and how long a stop of the large run takes.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.kit.neighbours import (
    Took,
    begin_large_run,
    longest_effect_s,
    num_waiting,
    prepare,
    stop_s,
    time_small_run,
)
from tests.kit.platform import platform


def show(name: str, took: Took) -> None:
    print(f"{name:<10}{took.first_s:>8.2f} s{took.end_s:>8.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=64, help="of a step of the large run")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--ahead", type=int, default=16, help="steps that are requested ahead")
    parser.add_argument("--tries", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, platform(Path(name) / "home") as running:
        prepare(running, Path(name) / "workspace", groups=given.groups)
        print(f"{'':<10}{'first':>10}{'end':>10}")
        alone = [time_small_run(running) for _ in range(given.tries)]
        for took in alone:
            show("alone", took)
        large = begin_large_run(
            running, groups=given.groups, samples=given.samples, ahead=given.ahead
        )
        print(f"samples that wait: {num_waiting(running)}")
        beside = [time_small_run(running) for _ in range(given.tries)]
        for took in beside:
            show("beside", took)
        print(f"samples that wait: {num_waiting(running)}")
        effect_s = longest_effect_s(running, large)
        print(f"longest effect of the large run: {effect_s:.2f} s")
        first_s = statistics.median(took.first_s for took in alone)
        end_s = statistics.median(took.end_s for took in alone)
        in_time = [
            took.first_s <= 2 * first_s + effect_s and took.end_s <= 3 * end_s for took in beside
        ]
        print(f"in time: {sum(in_time)} of {len(in_time)}")
        print(f"stop of the large run: {stop_s(running, large):.2f} s")


if __name__ == "__main__":
    main()
