"""B2, the platform's overhead: one GRPO step as a bare loop (sampler and learner) compared with the
platform.

4 prompts x 8 samples, 32 new tokens, 3.7M parameters, LoRA r16, and the same engine on both sides, in
one process, alternating A B B A. Prints medians, their ratio, where the time goes, and how much a step
writes to the disk. With `--stack` the platform runs on PostgreSQL, Kafka and an S3 store instead of the
embedded default. With `--sandbox bwrap gvisor` the user's workflow runs at these levels, which take
turns, each on a platform of its own. The processor time is that between the first step and the last,
with user code and without the database.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import pairwise

import numpy as np
import psutil

from bench.inside import Inside, inside
from infra.spine.ports.event_log import Recorded
from schemas.config import RunConfig
from schemas.learner import GradedGroup, LearnerJob, StepBatch
from schemas.sampling import (
    DrawKey,
    Message,
    ModelRef,
    PolicyRef,
    SampleRecord,
    SampleRequest,
    SamplingParams,
    Turn,
    sequences_of,
)
from tests.kit.platform import MAIN
from trainer.engine import Engine

MODEL = ModelRef(kind="scratch", name="qwen3-4m", seed=1)
PROMPTS = [f"What is {n} + {n + 3}? Think, then say the number." for n in range(10, 42)]
GROUPS, SAMPLES = 4, 8

FILES = {
    "rollouts/graded/main.py": MAIN.replace(
        "class Say(AgentWorkflow):\n    async def run(self, ctx):\n"
        "        reply = await ctx.chat(ctx.prompt)\n        return [*ctx.prompt, reply]\n",
        "",
    ),
    "rollouts/graded/pyproject.toml": '[project]\nname = "graded"\nversion = "0"\n',
}


def config(rollout: str, *, steps: int, tokens: int) -> dict[str, object]:
    return {
        "experiment": {
            "rollout": rollout,
            "entrypoint": "main.py",
            "model_path": "scratch:qwen3-4m",
            "dataset": "bench",
        },
        "training": {
            "lr": 1e-4,
            "n_samples_per_prompt": SAMPLES,
            "rollout_batch_size": GROUPS,
            "max_prompt_length": 128,
            "max_response_length": tokens,
        },
        "checkpoints": {"checkpoint_save_freq": 1_000_000},
        "advanced": {"max_steps": steps, "seed": 1},
    }


async def bare(engine: Engine, *, steps: int, tokens: int) -> list[float]:
    """Seconds per step of the loop anyone would write."""
    parsed = RunConfig.model_validate(config("say", steps=steps, tokens=tokens))
    job = LearnerJob(run=f"bare{time.time_ns()}", config=parsed, model=MODEL, total_steps=steps)
    state = (await engine.learner.initialize(job)).state
    params = SamplingParams(max_new_tokens=tokens, max_prompt_tokens=128, seed=1)
    times = []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        policy = PolicyRef(
            version=step - 1, weights=_held(state.weights_file_sha256, len(state.weights))
        )
        groups = await asyncio.gather(
            *(_group(engine, params, policy, step, s) for s in range(GROUPS))
        )
        result = await engine.learner.step(
            job, StepBatch(step=step, groups=tuple(groups)), export_state=True
        )
        state = result.state
        times.append(time.perf_counter() - start)
    return times


def _held(sha256: str, size: int):
    from schemas.artifact_refs import ArtifactRef

    return ArtifactRef(uri="memory:", sha256=sha256, size=size)


async def _group(
    engine: Engine, params: SamplingParams, policy: PolicyRef, step: int, slot: int
) -> GradedGroup:
    prompt = (Message(role="user", content=PROMPTS[(step * GROUPS + slot) % len(PROMPTS)]),)

    async def one(index: int) -> Turn:
        key = DrawKey(purpose="train", step=step, slot=slot, replacement=0, sample=index)
        request = SampleRequest(model=MODEL, policy=policy, params=params, key=key, messages=prompt)
        return await engine.sampler.sample(request)

    turns = await asyncio.gather(*(one(index) for index in range(SAMPLES)))
    records = tuple(
        SampleRecord(index=n, text=turn.text, sequences=sequences_of((turn,)))
        for n, turn in enumerate(turns)
    )
    rewards = tuple(sum(c.isdigit() for c in turn.text) / 8 for turn in turns)
    return GradedGroup(slot=slot, samples=records, rewards=rewards)


def step_seconds(events: Sequence[Recorded]) -> list[float]:
    """Seconds per step: from one StepSettled to the next."""
    times = [r.time for r in events if r.event.type == "rl.step.settled"]
    return [(b - a).total_seconds() for a, b in pairwise(times)]


def hops(events: Sequence[Recorded]) -> dict[str, float]:
    """Median milliseconds of each part of a step, by the log's own times."""
    parts: dict[str, list[float]] = {}
    last = None
    marks: dict[str, object] = {}
    for recorded in events:
        kind = recorded.event.type
        if kind == "rl.step.settled":
            if last is not None:
                order = [
                    ("generate", last, marks["rl.group.generated"]),
                    ("grade", marks["rl.group.generated"], marks["rl.group.graded"]),
                    ("assemble", marks["rl.group.graded"], marks["rl.batch.assembled"]),
                    ("learn and publish", marks["rl.batch.assembled"], recorded.time),
                ]
                for name, start, end in order:
                    parts.setdefault(name, []).append((end - start).total_seconds() * 1e3)
            last = recorded.time
        marks[kind] = recorded.time
    return {name: statistics.median(values[1:]) for name, values in parts.items()}


async def platform(
    box: Inside, rollout: str, *, steps: int, tokens: int
) -> tuple[list[float], tuple[float, float], dict[str, float], float, float]:
    """Seconds per step, when the first and the last ended, the hops, commits per step, fsyncs per
    step."""
    dataset = await box.dataset(PROMPTS)
    commits, syncs = box.runtime.commits, await _fsyncs(box)
    events = await box.run(config(rollout, steps=steps, tokens=tokens), MODEL, dataset)
    done = events[-1].event
    assert done.type == "rl.run.finished", done
    settled = [r.time.timestamp() for r in events if r.event.type == "rl.step.settled"]
    return (
        step_seconds(events),
        (settled[0], settled[-1]),
        hops(events),
        (box.runtime.commits - commits) / steps,
        (await _fsyncs(box) - syncs) / steps,
    )


async def _fsyncs(box: Inside) -> float:
    """WAL syncs of the database, and our own (blobs)."""
    await box.backend.database.durable.execute("select pg_stat_force_next_flush()")
    version = await box.backend.database.durable.fetchval(
        "select current_setting('server_version_num')::int"
    )
    wal = await box.backend.database.durable.fetchval(
        "select sum(fsyncs) from pg_stat_io where object = 'wal'"
        if version >= 180_000
        else "select wal_sync from pg_stat_wal"
    )
    return float(wal or 0) + FSYNCS[0]


CLOCK_S = 0.25
FSYNCS = [0]
_fsync = os.fsync


def _counted(descriptor: int) -> None:
    FSYNCS[0] += 1
    _fsync(descriptor)


class CpuClock:
    """Knows how much processor time this process and all below it had used at a time, also those that
    ended."""

    def __init__(self) -> None:
        self._read: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Read the clock until this task is cancelled."""
        while True:
            self.read()
            await asyncio.sleep(CLOCK_S)

    def read(self) -> None:
        own = psutil.Process()
        total = 0.0
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
        self._read.append((time.time(), total))

    def between(self, start: float, end: float) -> float:
        """The processor seconds between two times."""
        return float(np.interp(end, *zip(*self._read, strict=True))) - float(
            np.interp(start, *zip(*self._read, strict=True))
        )


async def main(steps: int, tokens: int, *, stack: bool, levels: Sequence[str]) -> None:
    os.fsync = _counted
    says = [f"say at {level}" for level in levels] or ["say"]
    half = ["bare", "graded", *says]
    seconds: dict[str, list[float]] = {}
    shown: dict[str, tuple[dict[str, float], float, float]] = {}
    cpu: dict[str, float] = {}
    async with AsyncExitStack() as opened:
        boxes: dict[str, Inside] = {}
        for side, level in zip(says, levels or [None], strict=True):
            if level is not None:
                os.environ["HEADRACE_SANDBOX"] = level
            boxes[side] = await opened.enter_async_context(inside(FILES, stack=stack))
        boxes["graded"] = boxes[says[0]]

        async def fetch(_: object) -> bytes:
            raise RuntimeError("the bare loop hands its weights over by pointer")

        engine = Engine(fetch=fetch)
        clock = CpuClock()
        reading = asyncio.ensure_future(clock.run())
        await bare(engine, steps=3, tokens=tokens)
        for side in says:
            await platform(boxes[side], "graded", steps=3, tokens=tokens)
        for side in half + half[::-1]:
            clock.read()
            if side == "bare":
                start = time.time()
                times = await bare(engine, steps=steps, tokens=tokens)
                marks = (start, time.time())
            else:
                rollout = "graded" if side == "graded" else "say"
                times, marks, parts, commits, fsyncs = await platform(
                    boxes[side], rollout, steps=steps, tokens=tokens
                )
                shown[side] = (parts, commits, fsyncs)
            clock.read()
            num_steps = steps if side == "bare" else steps - 1
            cpu[side] = cpu.get(side, 0.0) + clock.between(*marks) / num_steps / 2
            seconds.setdefault(side, []).extend(times[1:])
        reading.cancel()
        await engine.aclose()
    print(
        f"B2 platform tax: {GROUPS} x {SAMPLES} samples, {tokens} new tokens, {steps} steps a side, on "
        + ("PostgreSQL, Kafka and S3," if stack else "the embedded default,")
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}")
    show(seconds, cpu, shown)


def show(
    seconds: dict[str, list[float]],
    cpu: dict[str, float],
    shown: dict[str, tuple[dict[str, float], float, float]],
) -> None:
    """Print a row for each side, and below it the parts of its step."""
    base = statistics.median(seconds["bare"])
    print(f"{'side':42}{'s/step':>9}{'ratio':>8}{'CPU s/step':>12}{'commits':>9}{'fsyncs':>8}")
    names = {"bare": "bare loop", "graded": "platform, no user workflow"}
    for side in seconds:
        median = statistics.median(seconds[side])
        parts, commits, fsyncs = shown.get(side, ({}, 0.0, 0.0))
        name = names.get(side, side.replace("say", "platform, user workflow"))
        print(
            f"{name:42}{median:9.3f}{median / base:8.2f}{cpu[side]:12.3f}{commits:9.1f}{fsyncs:8.1f}"
        )
        for part, value in parts.items():
            print(f"    {part:38}{value:9.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--stack", action="store_true", help="on the real components")
    parser.add_argument(
        "--sandbox", nargs="+", default=[], metavar="LEVEL", help="levels of the user's workflow"
    )
    given = parser.parse_args()
    asyncio.run(main(given.steps, given.tokens, stack=given.stack, levels=tuple(given.sandbox)))
