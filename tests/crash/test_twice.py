"""Two processes for one consumer, as on a cluster: whichever of them decides, and whatever it remembers
of streams that the other has moved, the run ends with the bits of one that nobody disturbed."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.operations.local.embedded_postgres import place_of
from tests.kit.kills import Points, arm, fired_points
from tests.kit.ledger import check
from tests.kit.platform import (
    PATIENCE,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    platform_environment,
    run_config,
    serving,
)
from tests.kit.stacks import RealStack

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 6
CONFIG = run_config(advanced={"max_steps": STEPS, "state_interval": 2})
STILL_S = 1.5

EITHER = {"learn.perform.TrainStep.claimed": 2, "rollout.perform.GenerateSample.effect_done": 3}
POINTS: Mapping[str, Points] = {
    "first": {"run.intake.tx_before_commit": 4, **EITHER},
    "second": {"run.intake.tx_after_commit": 2, **EITHER},
}
"""Where the workers of each of the two kill themselves, if it is they who pass there. Of six steps, and
of all samples, one of the two passes often enough, so at least two are killed."""


@contextmanager
def started(home: Path, **environment: str) -> Iterator[Platform]:
    with platform(home, environment=environment) as running:
        yield running


def prepared(running: Platform, workspace: Path) -> None:
    running.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
    running.upload("numbers")


@contextmanager
def another_learner(running: Platform, home: Path) -> Iterator[None]:
    """One more `python -m consumers learn` beside the platform's own."""
    place = place_of(running.home)
    assert place is not None
    settings = {
        "HEADRACE_BLOBS": f"file://{running.home}/blobs",
        "HEADRACE_DATABASE_URL": place.url,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "consumers", "learn"], env=platform_environment(home, settings)
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE * 30)


def test_one_more_learner_changes_nothing(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    with started(tmp_path / "home", HEADRACE_WORKERS="two") as running:
        prepared(running, workspace)
        calm = running.wait(running.submit(CONFIG, workspace="w"), "finished", within_s=200)
        with another_learner(running, tmp_path / "another"):
            learners = eventually(lambda: two(running), within_s=60, what="two learners")
            run = running.submit(CONFIG, workspace="w")
            take_turns(running, run, learners)
            info = running.wait(run, "finished", within_s=200)
        check(running.events(run), steps=STEPS, groups=2, samples=4)
    assert final_adapter(info) == final_adapter(calm)


def two(running: Platform) -> list[int] | None:
    """The processes that take optimizer steps, once there are two."""
    workers = running.get("/status")["workers"]
    found = [worker["pid"] for worker in workers if "train" in worker["lanes"]]
    return found if len(found) == 2 else None


def take_turns(running: Platform, run: str, learners: Sequence[int]) -> None:
    """Until the last steps, one of the two stands still, for less than a lease and until the other one
    has gone on: so neither sees all of what it decides on."""
    for pid in itertools.cycle(learners):
        if (before := step(running, run)) >= STEPS - 1 or not all(map(psutil.pid_exists, learners)):
            return  # a slow machine may have taken a lease, and with it the process
        deadline = time.monotonic() + STILL_S
        os.kill(pid, signal.SIGSTOP)
        try:
            while step(running, run) == before and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.kafka
@pytest.mark.s3
def test_kills_and_rebalances_of_consumers_that_run_twice_change_nothing(
    tmp_path: Path, real_stack: RealStack
) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    fresh_settings = {**real_stack.fresh_settings(), "HEADRACE_WORKERS": "two"}
    with started(tmp_path / "calm", **real_stack.fresh_settings()) as running:
        prepared(running, workspace)
        calm = running.wait(running.submit(CONFIG, workspace="w"), "finished", within_s=200)
    with (
        started(tmp_path / "first", **fresh_settings, **arm(POINTS["first"])) as first,
        started(tmp_path / "second", **fresh_settings, **arm(POINTS["second"])) as second,
    ):
        prepared(first, workspace)
        run = first.submit(CONFIG, workspace="w")
        eventually(lambda: step(first, run) >= 2 or None, within_s=200, what="step 2")
        second.process.terminate()
        second.process.wait(PATIENCE * 60)
        second.process = serving(second.environment)
        info = first.wait(run, "finished", within_s=300)
        check(first.events(run), steps=STEPS, groups=2, samples=4)
    assert final_adapter(info) == final_adapter(calm)
    fired = [point for home in POINTS for point in fired_points(tmp_path / home)]
    assert len(fired) >= 2, f"too few were killed: {fired}"


def step(running: Platform, run: str) -> int:
    return int(running.info(run)["run"]["current_step"] or 0)
