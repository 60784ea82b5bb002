"""Pause, resume and stop while processes are killed: the run rests at a step boundary all the same, and
ends with the bits of a run that nobody touched."""

import random
from collections.abc import Callable
from typing import Any

from tests.chaos.victims import kill
from tests.kit.kills import Stage
from tests.kit.ledger import check
from tests.kit.platform import Platform, eventually, final_adapter, run_config

STEPS = 8
CONFIG = run_config(advanced={"max_steps": STEPS})
LONG = run_config(advanced={"max_steps": 500}, checkpoints={"checkpoint_save_freq": 1000})


def act(stage: Stage) -> None:
    with stage.platform() as running:
        pause_and_resume(running)
        stop(running)


def until(running: Platform, run: str, what: str, holds: Callable[[Any], bool]) -> Any:
    """The run's info, once that holds of it."""

    def look() -> Any:
        info = running.info(run)["run"]
        assert info["status"] in ("pending", "running"), info
        return info if holds(info) else None

    return eventually(look, within_s=60, what=what)


def kill_one(running: Platform, target: str) -> None:
    """One of these dies now; when it is being restarted, once it is there."""
    draw = random.Random(0)
    eventually(lambda: kill(running, target, draw), within_s=30, what=f"a {target} to kill")


def ask(running: Platform, run: str, what: str) -> None:
    answer = running.post(f"/runs/{run}/{what}", {})
    assert answer.status_code == 200, answer.text


def pause_and_resume(running: Platform) -> None:
    """A run that is paused and resumed under kills ends in the same bits."""
    undisturbed = final_adapter(running.wait(running.submit(CONFIG, workspace="w"), "finished"))
    run = running.submit(CONFIG, workspace="w")
    until(running, run, "step 1", lambda run: (run["current_step"] or 0) >= 1)
    ask(running, run, "pause")
    kill_one(running, "worker")
    rests_at = until(running, run, "paused", lambda run: run["phase"] == "paused")
    kill_one(running, "control")
    kill_one(running, "worker")
    now = until(running, run, "paused", lambda run: run["phase"] == "paused")
    assert now["current_step"] == rests_at["current_step"]
    ask(running, run, "resume")
    kill_one(running, "worker")
    assert final_adapter(running.wait(run, "finished")) == undisturbed
    events = running.events(run)
    check(events, steps=STEPS, groups=2, samples=4)
    told = [event["type"] for event in events]
    assert told.count("rl.run.paused") == told.count("rl.run.resumed") == 1


def stop(running: Platform) -> None:
    """A run that is stopped under kills ends with a final checkpoint."""
    run = running.submit(LONG, workspace="w")
    until(running, run, "step 2", lambda run: (run["current_step"] or 0) >= 2)
    ask(running, run, "stop")
    kill_one(running, "worker")
    kill_one(running, "control")
    info = running.wait(run, "stopped")
    assert [c["step"] for c in info["checkpoints"]] == [info["run"]["current_step"]]
    told = [event["type"] for event in running.events(run)]
    assert told.count("rl.run.stopped") == 1
