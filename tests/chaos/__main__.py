"""`make chaos`: many short deterministic runs, killed everywhere, and the ledger of what came of them.

    python -m tests.chaos --seed 0 --kills 200 --ledger chaos.jsonl      # go on: the same command
    python -m tests.chaos --stack real                     # on PostgreSQL, Kafka and an S3 store

Each trial is a run that must end, with the hash of its undisturbed twin, nothing lost, nothing done
twice. One line of JSON a trial goes to the ledger; a ledger that is there is gone on with. Exits 1 if
any trial differs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.plan import Trial, batches, points, trial
from tests.chaos.trials import Chaos, corners


def trials(given: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[Trial]:
    """The trials that are still to be done."""
    begun = time.monotonic()
    index = len(done)
    while sum(line["kills"] for line in done) < given.kills:
        if given.duration is not None and time.monotonic() - begun > given.duration:
            return
        yield trial(given.seed, index, stack=given.stack)
        index += 1


def main(given: argparse.Namespace) -> int:
    done = []
    if given.ledger.exists():
        done = [json.loads(line) for line in given.ledger.read_text().splitlines()]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corner = stack.enter_context(corners(given.stack, root))
        chaos = Chaos(root, seed=given.seed, corner=corner)
        shared = stack.enter_context(chaos.platform("home"))
        chaos.twins(shared)
        for one in trials(given, done):
            line = chaos.armed(one) if one.failpoints else chaos.killed(one, shared)
            done.append(line)
            with given.ledger.open("a") as file:
                file.write(json.dumps(line) + "\n")
            said = line.get("wrong", "as its twin")
            print(f"trial {one.index} {one.shape}: {line['kills']} kills, {said}", flush=True)
    return summary(done, given)


def summary(done: list[dict[str, Any]], given: argparse.Namespace) -> int:
    """Print the ledger. Returns the exit code."""
    wrong = [line for line in done if "wrong" in line]
    armed = batches(points(given.stack))
    fired = sum(line["kills"] for line in done[: len(armed)])
    kills = sum(line["kills"] for line in done)
    print(f"chaos on {given.stack}, seed {given.seed}: {len(done)} runs, {kills} x kill -9")
    print(
        f"  at failpoints: {fired} of {sum(len(points) for _, points in armed)}; others at random"
    )
    print(f"  runs that lost, doubled or changed anything: {len(wrong)}")
    for line in wrong:
        print(f"    trial {line['index']}: {line['wrong']}")
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200, help="stop after so many")
    parser.add_argument("--duration", type=float, help="stop after so many seconds")
    parser.add_argument("--stack", choices=("embedded", "real"), default="embedded")
    parser.add_argument("--ledger", type=Path, default=Path("chaos.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(arguments()))
