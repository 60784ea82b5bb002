"""Pause, resume and stop while processes are killed: the run rests at a step boundary all the same, and
ends with the bits of a run that nobody touched."""

import random
from collections.abc import Callable
from typing import Any

from tests.chaos.victims import kill
from tests.kit.kills import Stage
from tests.kit.ledger import check, check_costs
from tests.kit.platform import Platform, eventually, final_adapter, run_config

STEPS = 8
CONFIG = run_config(advanced={"max_steps": STEPS})
LONG = run_config(advanced={"max_steps": 500}, checkpoints={"checkpoint_save_freq": 1000})


def act(stage: Stage) -> None:
    with stage.platform() as running:
        undisturbed = pause_and_resume(running)
        exhaust_budget(running, undisturbed)
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


def pause_and_resume(running: Platform) -> str:
    """A run that is paused and resumed under kills ends in the same bits. Returns their hash."""
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
    return undisturbed


def exhaust_budget(running: Platform, undisturbed: str) -> None:
    """A run that its budget pauses, under kills, ends in the same bits once the budget is raised. Its
    ledger is the sum of its events, each once, and has the time that died with workers. It is worth its
    seconds, because only a kill makes such waste."""
    run = running.submit({**CONFIG, "budget": {"max_tokens": 1}}, workspace="w")
    kill_one(running, "worker")
    rests_at = until(running, run, "exhausted", lambda run: run["phase"] == "paused")
    assert rests_at["current_step"] == 1
    assert running.post(f"/runs/{run}/resume", {}).status_code == 409
    raised = running.post(f"/runs/{run}/resume", {"raise": {"max_tokens": 1_000_000}})
    assert raised.status_code == 200, raised.text
    until(running, run, "step 3", lambda run: (run["current_step"] or 0) >= 3)
    kill_one(running, "worker")
    assert final_adapter(running.wait(run, "finished")) == undisturbed
    events = running.events(run)
    check(events, steps=STEPS, groups=2, samples=4)
    [line] = running.get("/cost", run=run)["lines"]
    check_costs(events, line)
    assert sum(line["wasted"].values()) > 0


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
