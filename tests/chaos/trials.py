"""Trials carried out: a platform, a run, what is done to its processes, and what came of it.

Each trial is a run that must end, with the hash of its undisturbed twin, nothing lost, nothing done
twice. A run that does not end is a wrong line in the ledger too, with the evidence in a directory of its
own.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.faults import Faults
from tests.chaos.hangs import keep
from tests.chaos.plan import CONFIGS, Mode, Trial
from tests.chaos.scene import INSIDE, SLOW_GIT, Scene, SettingsFactory
from tests.chaos.syncs import Syncs
from tests.kit.kills import arm, fired_points
from tests.kit.ledger import check
from tests.kit.platform import (
    GRADER_ONLY,
    ROOT,
    Platform,
    final_adapter,
    make_workspace,
    platform,
    verify,
)
from tests.kit.stacks import RealStack
from tests.stack.components import Components, components

WITHIN_S = 80.0
FILES = {
    "rollouts/graded/main.py": GRADER_ONLY,
    "rollouts/graded/pyproject.toml": '[project]\nname = "graded"\nversion = "0"\n',
}
POOL = "3"
"""HEADRACE_DATABASE_POOL where each consumer has two processes: a server has some 100 connections."""


class Chaos:
    """A home, its workspace, and the hash that each shape of run must end in."""

    def __init__(
        self,
        root: Path,
        *,
        seed: int,
        fresh_settings: SettingsFactory,
        found: Components | None = None,
        kept: Path | None = None,
    ) -> None:
        """`kept`: where to put what is found of runs that do not end."""
        self.root = root
        self.seed = seed
        self.fresh_settings = fresh_settings
        self.components = found
        self.kept = kept or root / "hangs"
        self.workspace = make_workspace(root / "workspace", FILES)
        self.calm: dict[str, str] = {}

    @contextmanager
    def platform(self, home: str, **environment: str) -> Iterator[Platform]:
        """A platform with the workspace and the dataset."""
        settings = {**self.fresh_settings(), "PYTHONPATH": f"{ROOT}:{INSIDE}", **environment}
        with platform(self.root / home, environment=settings) as started:
            made = started.post("/workspaces", {"url": str(self.workspace), "name": "w"}, key="w")
            assert made.status_code == 201, made.text
            started.upload("numbers")
            yield started

    @contextmanager
    def scene(self, mode: Mode, home: str) -> Iterator[Scene]:
        """The scene of this mode's trials, in a home of its own. The undisturbed runs are done."""
        environment = {"PATH": self._slow_git()} if mode == "children" else {}
        if mode == "twice":
            environment["HEADRACE_DATABASE_POOL"] = POOL
        with self.platform(home, **environment) as first:
            if not self.calm:
                self.twins(first)
            scene = Scene(self.root, first, self.components)
            if mode == "twice":
                with scene.doubled(f"{home}-second"):
                    yield scene
            else:
                yield scene

    def _slow_git(self) -> str:
        """A PATH on which git takes long enough to be killed."""
        wrapper = self.root / "slow" / "git"
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(SLOW_GIT)
        wrapper.chmod(0o755)
        return f"{wrapper.parent}:{os.environ['PATH']}"

    def twins(self, started: Platform) -> None:
        """The undisturbed runs."""
        for shape, config in CONFIGS.items():
            info = started.wait(started.submit(config, workspace="w"), "finished")
            self.calm[shape] = final_adapter(info)

    def line(self, one: Trial, run: str, started: Platform) -> dict[str, Any]:
        """Wait for the end of a trial's run, and hold it against its twin."""
        begun = time.monotonic()
        info = started.wait(run, within_s=WITHIN_S)
        line: dict[str, Any] = {
            "index": one.index,
            "shape": one.shape,
            "run": run,
            "status": info["run"]["status"],
            "seconds": round(time.monotonic() - begun, 1),
            "ended_at": _unix(info["run"]["completed_at"]),
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
        home = f"armed-{one.index}"
        with self.platform(home, **arm(one.failpoints), HEADRACE_WORKERS="each") as started:
            for _ in range(4):
                run = started.submit(CONFIGS[one.shape], workspace="w")
                line = self.line(one, run, started)
                verified(started, run)
                fired = fired_points(started.home)
                if "wrong" in line or fired == set(one.failpoints):
                    break
        missing = sorted(set(one.failpoints) - fired)
        if missing and "wrong" not in line:
            line["wrong"] = f"never fired: {missing}"
        return {**line, "kills": len(fired), "deaths": sorted(fired)}

    def disturbed(self, one: Trial, scene: Scene, mode: Mode) -> dict[str, Any]:
        """A trial of faults, in a scene that goes on from trial to trial. A line with `hung` says that
        the scene is of no more use."""
        draw = random.Random(f"{self.seed}/{one.index}/victims")
        faults = Faults(scene, draw, syncs=Syncs(self.workspace, scene, one.index))
        run = ""
        try:
            scene.lay_out(one.layout)
            if mode == "children":
                faults.syncs.commit()
            run = scene.first.submit(CONFIGS[one.shape], workspace="w")
            faults.carry_out(one.faults)
            line = self.line(one, run, scene.first)
            if mode == "children" and "wrong" not in line and (wrong := faults.syncs.wrong()):
                line["wrong"] = wrong
        except (AssertionError, OSError, httpx.HTTPError) as error:
            line = self._hung(one, run, scene, str(error))
        finally:
            faults.undo()
        counted = faults.counted(line.get("ended_at"))
        return {**line, "layout": one.layout, **counted, "did": faults.did, "at": faults.at}

    def _hung(self, one: Trial, run: str, scene: Scene, error: str) -> dict[str, Any]:
        directory = self.kept / f"trial-{one.index}"
        summed = keep(directory, run, scene.processes, scene.database)
        return {
            "index": one.index,
            "shape": one.shape,
            "run": run,
            "wrong": f"{error[:300]}: {summed}",
            "hung": str(directory),
        }


def _unix(time_: str | None) -> float | None:
    return datetime.fromisoformat(time_).timestamp() if time_ else None


def verified(started: Platform, run: str) -> None:
    """The run is what its log says."""
    found = verify(started, run, within_s=WITHIN_S)
    assert found["status"] == "verified", found


@contextmanager
def open_stack(stack: str, root: Path) -> Iterator[tuple[SettingsFactory, Components | None]]:
    """A function that gives each platform settings of its own on this stack, and the components."""
    if stack == "embedded":
        yield dict, None
        return
    with components(root / "stack") as found:
        yield RealStack.of(found).fresh_settings, found
