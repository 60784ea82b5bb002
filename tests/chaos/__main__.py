"""`make chaos`: many short deterministic runs, killed everywhere, and the ledger of what came of them.

    python -m tests.chaos --seed 0 --kills 200 --ledger chaos.jsonl      # go on: the same command
    python -m tests.chaos --stack real                     # on PostgreSQL, Kafka and an S3 store

Each trial is a run that must end, with the hash of its undisturbed twin, nothing lost, nothing done
twice. One line of JSON a trial goes to the ledger; a ledger that is there is gone on with. Exits 1 if
any trial differs.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infra.stack.components import components
from tests.chaos.plan import CONFIGS, Trial, batches, points, trial
from tests.chaos.victims import kill
from tests.kit.ledger import check
from tests.kit.platform import (
    GRADER_ONLY,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    serving,
)
from tests.kit.stacks import RealStack

WITHIN_S = 300.0
FILES = {
    "rollouts/graded/main.py": GRADER_ONLY,
    "rollouts/graded/pyproject.toml": '[project]\nname = "graded"\nversion = "0"\n',
}


class Chaos:
    """A home, its workspace, and the hash that each shape of run must end in."""

    def __init__(self, root: Path, *, seed: int, corner: Callable[[], Mapping[str, str]]) -> None:
        self.root = root
        self.seed = seed
        self.corner = corner
        self.workspace = make_workspace(root / "workspace", FILES)
        self.calm: dict[str, str] = {}
        self.started: Platform | None = None

    @contextmanager
    def platform(self, home: str, **environment: str) -> Iterator[Platform]:
        """A platform with the workspace and the dataset."""
        settings = {**self.corner(), **environment}
        with platform(self.root / home, environment=settings) as started:
            made = started.post("/workspaces", {"url": str(self.workspace), "name": "w"}, key="w")
            assert made.status_code == 201, made.text
            started.upload("numbers")
            yield started

    def twins(self, started: Platform) -> None:
        """The undisturbed runs."""
        for shape, config in CONFIGS.items():
            info = started.wait(started.submit(config, workspace="w"), "finished")
            self.calm[shape] = final_adapter(info)

    def line(self, one: Trial, run: str, started: Platform, deaths: list[str]) -> dict[str, Any]:
        """Wait for the end of a trial's run, and hold it against its twin."""
        begun = time.monotonic()
        info = started.wait(run, within_s=WITHIN_S)
        line: dict[str, Any] = {
            "index": one.index,
            "shape": one.shape,
            "run": run,
            "status": info["run"]["status"],
            "seconds": round(time.monotonic() - begun, 1),
            "kills": len(deaths),
            "deaths": deaths,
        }
        if line["status"] != "finished":
            return {**line, "wrong": str(info["run"]["error"])}
        if final_adapter(info) != self.calm[one.shape]:
            line["wrong"] = "another hash than the undisturbed twin"
        if one.shape != "sft":
            try:
                check(started.events(run), steps=6, groups=2, samples=4)
            except AssertionError as error:
                line["wrong"] = f"ledger: {error}"
        return line

    def armed(self, one: Trial) -> dict[str, Any]:
        """A trial of failpoints: in a platform of its own, a process for each consumer, since only
        there every consumer's own intake is passed. Runs again until all have fired."""
        text = ",".join(f"{name}:{hit}" for name, hit in one.failpoints.items())
        home = f"armed-{one.index}"
        with self.platform(home, HEADRACE_FAILPOINT=text, HEADRACE_WORKERS="each") as started:
            markers = self.root / home / "failpoints"
            for _ in range(4):
                run = started.submit(CONFIGS[one.shape], workspace="w")
                line = self.line(one, run, started, [])
                verified(started, run)
                fired = {m.name for m in markers.iterdir()} if markers.exists() else set()
                if "wrong" in line or fired == set(one.failpoints):
                    break
        missing = sorted(set(one.failpoints) - fired)
        if missing and "wrong" not in line:
            line["wrong"] = f"never fired: {missing}"
        return {**line, "kills": len(fired), "deaths": sorted(fired)}

    def killed(self, one: Trial, started: Platform) -> dict[str, Any]:
        """A trial of random kills, in a platform that goes on from trial to trial."""
        draw = random.Random(f"{self.seed}/{one.index}/victims")
        run = started.submit(CONFIGS[one.shape], workspace="w")
        begun, deaths = time.monotonic(), []
        for planned in one.kills:
            time.sleep(max(0.0, begun + planned.after_s - time.monotonic()))
            died = kill(started, planned.target, draw)
            if died is not None:
                deaths.append(died)
            if planned.target == "supervisor":
                started.process.wait(10)
                eventually(lambda: _gone(started), within_s=30, what="what it left is gone")
                started.process = serving(started.environment)
        return self.line(one, run, started, deaths)


def _gone(started: Platform) -> bool | None:
    """Whether nobody owns the home's database directory any more."""
    found = subprocess.run(
        ["pgrep", "-f", str(started.home)], capture_output=True, check=False, text=True
    )
    return True if not found.stdout.strip() else None


def verified(started: Platform, run: str) -> None:
    """The run is what its log says."""
    asked = started.post(f"/runs/{run}/verify", {}).json()["verification"]["id"]

    def ended() -> Any:
        found = started.get(f"/verifications/{asked}")["verification"]
        return None if found["status"] == "running" else found

    found = eventually(ended, within_s=WITHIN_S, what="the verification ends")
    assert found["status"] == "verified", found


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


@contextmanager
def corners(stack: str, root: Path) -> Iterator[Callable[[], Mapping[str, str]]]:
    """What gives each platform the settings of a place of its own on this stack."""
    if stack == "embedded":
        yield dict
        return
    with components(root / "stack") as found:
        yield RealStack.of(found).corner


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
