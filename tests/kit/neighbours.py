"""A small run beside a large one: how long its first sample and its end take."""

import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.kit.platform import Platform, eventually, make_workspace, run_config


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds from the submit of a run until its first sample and until its end."""

    first_s: float
    end_s: float


def prepare(running: Platform, directory: Path, *, groups: int) -> None:
    """Register the workspace and the datasets of both runs, and load the model with a first run."""
    workspace = make_workspace(directory)
    running.post("/workspaces", {"url": str(workspace), "name": "w"})
    running.upload("numbers")
    rows = [{"user_prompt": f"Say {n}", "ground_truth": str(n)} for n in range(groups)]
    running.upload("many", "".join(json.dumps(row) + "\n" for row in rows))
    time_small_run(running)


def time_small_run(running: Platform) -> Took:
    """Run two steps of eight samples. Raises AssertionError when the run fails, or records a sample
    twice."""
    config = run_config(advanced={"max_steps": 2})
    run = running.submit(config, workspace="w")
    running.wait(run, "finished", within_s=300, every_s=0.5)
    events = running.events(run)
    samples = [e["id"] for e in events if e["type"] == "rl.sample.generated"]
    assert len(samples) == 16, f"16 samples are asked for, {len(samples)} were recorded"
    began = _time_of(events, "rl.run.requested")
    first, end = (
        (_time_of(events, type_) - began).total_seconds()
        for type_ in ("rl.sample.generated", "rl.run.finished")
    )
    return Took(first, end)


def median(runs: Iterable[Took]) -> Took:
    """Return the middle one of an odd number of runs, by their first samples and by their ends. One run
    alone says too much about the moment at which it ran."""
    took = list(runs)
    return Took(
        statistics.median(run.first_s for run in took), statistics.median(run.end_s for run in took)
    )


def begin_large_run(
    running: Platform, *, groups: int, samples: int, ahead: int, steps: int = 1000
) -> str:
    """Submit a fully_async run that requests `ahead` steps at once, and wait until it trains."""
    config = run_config(
        experiment={"dataset": "many"},
        training={"rollout_batch_size": groups, "n_samples_per_prompt": samples},
        advanced={
            "max_steps": steps,
            "execution_mode": "fully_async",
            "max_steps_off_policy": ahead,
        },
    )
    run = running.submit(config, workspace="w")
    eventually(
        lambda: True if running.info(run)["run"]["current_step"] else None,
        within_s=300,
        what="the large run takes its first step",
        every_s=0.5,
    )
    return run


EFFECT_TIMES = ("time/generate_s", "time/grade_s", "time/learn_s")


def longest_effect_s(running: Platform, run: str) -> float:
    """Return how long the longest effect of a run took: a sample, a graded group or a step of the
    learner. A small run waits for at most one of them before its own turn."""
    metrics = [e["data"]["metrics"] for e in running.events(run) if e["type"] == "rl.step.settled"]
    return max(float(step.get(name, 0.0)) for step in metrics for name in EFFECT_TIMES)


def num_waiting(running: Platform) -> int:
    """Return how many samples wait, of any run."""
    return int(running.get("/status")["effects"].get("generate", {}).get("waiting", 0))


def stop_s(running: Platform, run: str) -> float:
    """Stop a run, and return how many seconds that took."""
    began = time.monotonic()
    assert running.post(f"/runs/{run}/stop", {}).status_code == 200
    running.wait(run, "stopped", within_s=300)
    return time.monotonic() - began


def _time_of(events: list[Any], type_: str) -> datetime:
    return next(datetime.fromisoformat(e["time"]) for e in events if e["type"] == type_)
