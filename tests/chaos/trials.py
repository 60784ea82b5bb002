"""Trials carried out: a platform, a run, what dies of it, and what came of it.

Each trial is a run that must end, with the hash of its undisturbed twin, nothing lost, nothing done
twice.
"""

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.stack.components import components
from tests.chaos.plan import CONFIGS, Trial
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

Corner = Callable[[], Mapping[str, str]]
"""The settings of a platform in a place of its own."""

WITHIN_S = 300.0
FILES = {
    "rollouts/graded/main.py": GRADER_ONLY,
    "rollouts/graded/pyproject.toml": '[project]\nname = "graded"\nversion = "0"\n',
}


class Chaos:
    """A home, its workspace, and the hash that each shape of run must end in."""

    def __init__(self, root: Path, *, seed: int, corner: Corner) -> None:
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
                started.process.wait(60)
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


@contextmanager
def corners(stack: str, root: Path) -> Iterator[Corner]:
    """What gives each platform the settings of a place of its own on this stack."""
    if stack == "embedded":
        yield dict
        return
    with components(root / "stack") as found:
        yield RealStack.of(found).corner
