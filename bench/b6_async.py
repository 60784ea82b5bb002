"""B6, execution modes with stragglers: the same run in sync, one_step_off_async and fully_async.

The lengths of samples have a log-normal tail, and a group's grader takes 50 ms to 5 s (log-uniform; it
waits, as for a judge or a test suite). The delays of a sample and of its grader are functions of the
sampled text, so the same tokens always have the same delays. Two processes: one samples, one learns.
Prints steps/s from version 0 to the last step, the overlap, the lag and its bound, the groups that were
thrown away, and whether a second run ends in the same bits. Exits with 1 where one of these is not as
promised.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.toml.parser import parse_run
from tests.kit.platform import ROWS, Platform, final_adapter, make_workspace, platform
from trainer.schedule import Pace, pace_of

MAIN = '''
import asyncio
import hashlib
import math
import random

from headrace import AgentWorkflow, Grader

MEDIAN_TOKENS, SIGMA = 20, 1.0
SHORTEST_S, LONGEST_S = 0.05, 5.0


def drawn(*said):
    return random.Random(hashlib.sha256(repr(said).encode()).digest())


class Think(AgentWorkflow):
    """A word, then a thought whose length has a long tail."""

    async def run(self, ctx):
        word = await ctx.chat(ctx.prompt, max_tokens=2)
        draw = drawn(ctx.prompt[-1]["content"], word["content"])
        length = max(1, round(math.exp(draw.gauss(math.log(MEDIAN_TOKENS), SIGMA))))
        asked = [*ctx.prompt, word, {"role": "user", "content": "Go on"}]
        return [*asked, await ctx.chat(asked, max_tokens=length)]


class Slow(Grader):
    async def grade(self, ctx):
        draw = drawn(*sorted(sample.text for sample in ctx.samples.values()))
        await asyncio.sleep(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** draw.random())
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, sum(c.isdigit() for c in sample.text) / 64)
'''
FILES = {
    "rollouts/think/main.py": MAIN,
    "rollouts/think/pyproject.toml": '[project]\nname = "think"\nversion = "0"\n',
}
MODES = ("sync", "one_step_off_async", "fully_async")
LEAST = 2.0
"""How many times faster than sync fully_async must be."""


@dataclass(frozen=True)
class Measured:
    """A run: steps per second; the seconds in which the learner learned and waited; of how many groups
    sampling ended before the step before theirs was taken (`ahead`)."""

    steps_s: float
    lags: list[float]
    pace: Pace
    learned: float
    waited: float
    ahead: int
    groups: int
    discarded: int
    adapter: str
    longest: int


def config(mode: str, given: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The run; only its mode differs."""
    return {
        "experiment": {
            "rollout": "think",
            "entrypoint": "main.py",
            "model_path": "scratch:qwen3-4m",
            "dataset": "numbers",
        },
        "training": {
            "lr": 1e-4,
            "n_samples_per_prompt": given.samples,
            "rollout_batch_size": given.groups,
            "max_prompt_length": 512,
            "max_response_length": given.tokens + 2,
            "max_answer_length": given.tokens,
        },
        "checkpoints": {"checkpoint_save_freq": given.steps},
        "advanced": {
            "execution_mode": mode,
            "max_steps": given.steps,
            "seed": 1,
            "deterministic": True,
        },
    }


def measure_mode(running: Platform, mode: str, given: argparse.Namespace) -> Measured:
    """Submit, wait, and read the log."""
    said = config(mode, given)
    run = running.submit(said, workspace="w")
    info = running.wait(run, "finished", within_s=900, every_s=1.0)
    events = running.events(run)
    settled = list(_of(events, "rl.step.settled"))
    seconds = settled[-1]["at"] - settled[0]["at"]
    metrics = [data["metrics"] for data in settled[1:]]
    entries = [e for data in _of(events, "rl.group.generated") for e in data["entries"]]
    requested = {
        (data["step"], slot["slot"], slot["replacement"])
        for data in _of(events, "rl.groups.requested")
        for slot in data["slots"]
    }
    trained = {
        (data["step"], group["slot"], group["replacement"])
        for data in _of(events, "rl.batch.assembled")
        for group in data["groups"]
    }
    return Measured(
        steps_s=given.steps / seconds,
        lags=[m["train/lag"] for m in metrics],
        pace=pace_of(parse_run(said)),
        learned=sum(m["time/learn_s"] for m in metrics),
        waited=sum(m["time/wait_s"] for m in metrics),
        ahead=_ahead(events),
        groups=len(trained),
        discarded=len(requested - trained),
        adapter=final_adapter(info),
        longest=max(entry["completion_tokens"] for entry in entries),
    )


def _of(events: list[Any], kind: str) -> Iterator[Mapping[str, Any]]:
    return (event["data"] for event in events if event["type"] == kind)


def _ahead(events: list[Any]) -> int:
    """Groups whose sampling ended before the step before theirs was taken."""
    taken, ahead = 0, 0
    for event in events:
        if event["type"] == "rl.policy.updated":
            taken = event["data"]["step"]
        elif event["type"] == "rl.group.generated":
            ahead += int(event["data"]["spec"]["group"].split("-")[-3]) > taken + 1
    return ahead


def report(runs: Mapping[str, Measured], again: Measured) -> bool:
    """Print the table; whether all that B6 asks for was reached."""
    base = runs["sync"].steps_s
    print(f"{'mode':<20}{'steps/s':>8}{'of sync':>9}{'lag':>5}{'bound':>6}", end="")
    print(f"{'ahead':>8}{'learn s':>9}{'wait s':>8}{'thrown away':>13}")
    for mode, run in runs.items():
        print(f"{mode:<20}{run.steps_s:>8.3f}{run.steps_s / base:>8.2f}x", end="")
        print(f"{max(run.lags):>5.0f}{run.pace.most_lag:>6}{run.ahead:>4}/{run.groups}", end="")
        print(f"{run.learned:>9.1f}{run.waited:>8.1f}{run.discarded:>13}")
    fast = runs["fully_async"]
    same = again.adapter == fast.adapter
    print(f"longest sample {max(r.longest for r in runs.values())} tokens")
    print(f"fully_async again: {'the same bits' if same else 'OTHER BITS'}, {again.steps_s:.3f}/s")
    held = all(max(r.lags) <= r.pace.most_lag and not r.discarded for r in runs.values())
    print(f"lag within its bound, nothing thrown away: {'yes' if held else 'NO'}")
    return same and held and fast.steps_s >= LEAST * base


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    print(
        f"B6 modes: {given.steps} steps of {given.groups} x {given.samples} samples, "
        f"up to {given.tokens} tokens, graders 50 ms to 5 s, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        workspace = make_workspace(Path(directory) / "workspace", FILES)
        environment = {"HEADRACE_WORKERS": "two", "OMP_WAIT_POLICY": "PASSIVE"}
        with platform(Path(directory) / "home", environment=environment) as running:
            running.post("/workspaces", {"url": str(workspace), "name": "w"})
            running.upload("numbers", ROWS)
            measure_mode(running, "sync", argparse.Namespace(**{**vars(given), "steps": 1}))
            runs = {mode: measure_mode(running, mode, given) for mode in MODES}
            reached = report(runs, measure_mode(running, "fully_async", given))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
