"""`make chaos`: many short deterministic runs, disturbed everywhere, and a ledger of the results.

    python -m tests.chaos --seed 0 --kills 200 --ledger chaos.jsonl      # go on: the same command
    python -m tests.chaos --stack real                     # on PostgreSQL, Kafka and an S3 store
    python -m tests.chaos --mode freeze                    # see below

Modes: `kills` kills at every failpoint and at random. `twice` has two processes for each consumer, kills
them, and has some leave and join. `freeze` stops several processes at once for 1 to 10 seconds, the
database too. `children` kills every kind of process that another one starts, git included.

Each trial is a run that must end, with the hash of its undisturbed twin, nothing lost, nothing done
twice. One line of JSON a trial goes to the ledger; a ledger that is there is gone on with. What is found
of a run that does not end goes into a directory beside it. Exits 1 if any trial differs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.plan import MODES, Trial, batches, points, trial
from tests.chaos.trials import Chaos, open_stack
from tests.kit.platform import forget_homes


def trials(given: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[Trial]:
    """The trials that are still to be done; `done` grows meanwhile."""
    begun = time.monotonic()
    while sum(map(faults, done)) < given.kills:
        if given.duration is not None and time.monotonic() - begun > given.duration:
            return
        yield trial(given.seed, len(done), stack=given.stack, mode=given.mode)


def faults(line: dict[str, Any]) -> int:
    """Kills and pauses of a trial."""
    return int(line.get("kills", 0)) + int(line.get("pauses", 0))


def main(given: argparse.Namespace) -> int:
    done = []
    if given.ledger.exists():
        done = [json.loads(line) for line in given.ledger.read_text().splitlines()]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(forget_homes)
        fresh_settings, found = stack.enter_context(open_stack(given.stack, root))
        kept = given.ledger.with_suffix(".hangs")
        chaos = Chaos(root, seed=given.seed, fresh_settings=fresh_settings, found=found, kept=kept)
        left = trials(given, done)
        while carried_out(given, chaos, left, done):
            print("the platform is started again, on an empty home", flush=True)
    return summary(done, given)


def carried_out(
    given: argparse.Namespace, chaos: Chaos, left: Iterator[Trial], done: list[dict[str, Any]]
) -> bool:
    """Carry out what is left, up to a run that does not end. Returns whether there was one."""
    commit = own_commit()
    with chaos.scene(given.mode, f"home-{len(done)}") as scene:
        for one in left:
            line = chaos.armed(one) if one.failpoints else chaos.disturbed(one, scene, given.mode)
            done.append({**line, "commit": commit})
            with given.ledger.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            said = line.get("wrong", "as its twin")
            print(f"trial {one.index} {one.shape}: {faults(line)} faults, {said}", flush=True)
            if "hung" in line:
                return True
    return False


def own_commit() -> str:
    """The commit of this checkout; "unknown" where there is none."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def summary(done: list[dict[str, Any]], given: argparse.Namespace) -> int:
    """Print the ledger. Returns the exit code."""
    wrong = [line for line in done if "wrong" in line]
    kills, pauses = (sum(line.get(name, 0) for line in done) for name in ("kills", "pauses"))
    print(f"chaos {given.mode} on {given.stack}, seed {given.seed}: {len(done)} runs,", end=" ")
    print(f"{kills} x kill -9, {pauses} pauses")
    if given.mode == "kills":
        armed = batches(points(given.stack))
        fired = sum(line["kills"] for line in done[: len(armed)])
        of = sum(len(points) for _, points in armed)
        print(f"  at failpoints: {fired} of {of}; others at random")
    print(f"  runs that lost, doubled or changed anything, or did not end: {len(wrong)}")
    for line in wrong:
        print(f"    trial {line['index']}: {line['wrong']}")
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="kills")
    parser.add_argument("--kills", type=int, default=200, help="stop after so many, or pauses")
    parser.add_argument("--duration", type=float, help="stop after so many seconds")
    parser.add_argument("--stack", choices=("embedded", "real"), default="embedded")
    parser.add_argument("--ledger", type=Path, help="default: chaos[-MODE][-real].jsonl")
    given = parser.parse_args()
    if given.ledger is None:
        mode = "" if given.mode == "kills" else f"-{given.mode}"
        stack = "" if given.stack == "embedded" else "-real"
        given.ledger = Path(f"chaos{mode}{stack}.jsonl")
    return given


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped in order
    sys.exit(main(arguments()))
