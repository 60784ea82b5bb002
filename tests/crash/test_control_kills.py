"""Pause, resume and stop while processes are killed: the run rests at a step boundary all the same, and
ends with the bits of a run that nobody touched."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.victims import kill
from tests.kit.ledger import check
from tests.kit.platform import (
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 8
CONFIG = run_config(advanced={"max_steps": STEPS})
LONG = run_config(advanced={"max_steps": 500}, checkpoints={"checkpoint_save_freq": 1000})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root: Path = tmp_path_factory.mktemp("control-kills")
    workspace = make_workspace(root / "workspace")
    with platform(root / "home") as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"})
        started.upload("numbers")
        yield started


def until(running: Platform, run: str, what: str, holds: Callable[[Any], bool]) -> Any:
    """The run's info, once that holds of it."""

    def look() -> Any:
        info = running.info(run)["run"]
        assert info["status"] in ("pending", "running"), info
        return info if holds(info) else None

    return eventually(look, within_s=60, what=what)


def killed(running: Platform, target: str) -> None:
    """One of these dies now; when it is being restarted, once it is there."""
    draw = random.Random(0)
    eventually(lambda: kill(running, target, draw), within_s=30, what=f"a {target} to kill")


def asked(running: Platform, run: str, what: str) -> None:
    answer = running.post(f"/runs/{run}/{what}", {})
    assert answer.status_code == 200, answer.text


def test_a_run_that_is_paused_and_resumed_under_kills_ends_in_the_same_bits(
    running: Platform,
) -> None:
    undisturbed = final_adapter(running.wait(running.submit(CONFIG, workspace="w"), "finished"))
    run = running.submit(CONFIG, workspace="w")
    until(running, run, "step 1", lambda run: (run["current_step"] or 0) >= 1)
    asked(running, run, "pause")
    killed(running, "worker")
    rests_at = until(running, run, "paused", lambda run: run["phase"] == "paused")
    killed(running, "control")
    killed(running, "worker")
    now = until(running, run, "paused", lambda run: run["phase"] == "paused")
    assert now["current_step"] == rests_at["current_step"]
    asked(running, run, "resume")
    killed(running, "worker")
    assert final_adapter(running.wait(run, "finished")) == undisturbed
    events = running.events(run)
    check(events, steps=STEPS, groups=2, samples=4)
    told = [event["type"] for event in events]
    assert told.count("rl.run.paused") == told.count("rl.run.resumed") == 1


def test_a_run_that_is_stopped_under_kills_ends_with_a_final_checkpoint(
    running: Platform,
) -> None:
    run = running.submit(LONG, workspace="w")
    until(running, run, "step 2", lambda run: (run["current_step"] or 0) >= 2)
    asked(running, run, "stop")
    killed(running, "worker")
    killed(running, "control")
    info = running.wait(run, "stopped")
    assert [c["step"] for c in info["checkpoints"]] == [info["run"]["current_step"]]
    told = [event["type"] for event in running.events(run)]
    assert told.count("rl.run.stopped") == 1
