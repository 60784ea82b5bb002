"""The arithmetic recipe in bare loops: SFT from random weights, then GRPO, without the platform.

    python bench/recipe.py --seed 0 1 2 3 4

It is the run of `headrace demo`, with the same data, run files and order of rows, made of engine calls
alone. The platform must reach the reward that this reaches, and the platform's overhead is measured
against the seconds that this takes.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from schemas.artifact_refs import ArtifactRef
from schemas.config import RunConfig
from schemas.learner import Conversation, GradedGroup, LearnerJob, StepBatch, StepResult
from schemas.models.scratch import PREFIX
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
from trainer.engine import Engine
from trainer.schedule import step_rows

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
SAMPLED_TIMES = 4


@dataclass(frozen=True, slots=True)
class Question:
    """A row of the example's data."""

    asked: str
    answer: str

    def reward(self, turn: Turn) -> float:
        """1 if the answer ended and what stands after its last `=` is the sum."""
        _, equals, said = turn.text.rpartition("=")
        return float(turn.finish_reason == "stop" and bool(equals) and said == self.answer)


def data(seed: int) -> dict[str, list[Question]]:
    """The example's files, as its own maker writes them."""
    spec = importlib.util.spec_from_file_location("make", EXAMPLE / "data" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    made: Mapping[str, Sequence[Mapping[str, str]]] = maker.make(seed)
    return {
        name.removesuffix(".jsonl").removeprefix("arithmetic-"): [
            Question(row["user_prompt"], row["ground_truth"]) for row in rows
        ]
        for name, rows in made.items()
    }


def config(name: str, *, seed: int, deterministic: bool, **override: float) -> RunConfig:
    """A run file of the example. `override` sets keys of [training] or [advanced]."""
    run = tomllib.loads((EXAMPLE / "configs" / "training" / f"{name}.toml").read_text())
    run["advanced"] |= {"seed": seed, "deterministic": deterministic}
    for key, value in override.items():
        run["training" if key in run["training"] else "advanced"][key] = value
    return RunConfig.model_validate(run, strict=False)


class Bench:
    """Bytes that would be artifacts, and the engine."""

    def __init__(self, *, threads: int, deterministic: bool) -> None:
        self._bytes: dict[str, bytes] = {}
        self.deterministic = deterministic
        self.engine = Engine(fetch=lambda ref: self._bytes[ref.sha256], threads=threads)

    def put(self, sha256: str, data: bytes) -> ArtifactRef:
        self._bytes[sha256] = data
        return ArtifactRef(uri=f"memory:{sha256}", sha256=sha256, size=len(data))

    async def sample(
        self,
        model: ModelRef,
        policy: PolicyRef,
        prompts: Sequence[Question],
        *,
        samples: int,
        temperature: float,
        purpose: str,
        step: int,
        seed: int,
    ) -> list[list[Turn]]:
        params = SamplingParams(
            temperature=temperature,
            max_prompt_tokens=48,
            max_new_tokens=12,
            seed=seed,
            deterministic=self.deterministic,
        )
        requests = [
            SampleRequest(
                model=model,
                policy=policy,
                params=params,
                key=DrawKey(purpose=purpose, step=step, slot=slot, replacement=0, sample=i),
                messages=(Message(role="user", content=question.asked),),
            )
            for slot, question in enumerate(prompts)
            for i in range(samples)
        ]
        turns = await asyncio.gather(*(self.engine.sampler.sample(r) for r in requests))
        return [list(turns[i : i + samples]) for i in range(0, len(turns), samples)]

    async def accuracy(
        self, model: ModelRef, policy: PolicyRef, held_out: Sequence[Question], seed: int
    ) -> dict[str, float]:
        scores: dict[str, float] = {}
        for name, temperature, samples in (("greedy", 0.0, 1), ("sampled", 1.0, SAMPLED_TIMES)):
            groups = await self.sample(
                model,
                policy,
                held_out,
                samples=samples,
                temperature=temperature,
                purpose="evaluate",
                step=policy.version,
                seed=seed,
            )
            graded = [
                question.reward(turn)
                for question, turns in zip(held_out, groups, strict=True)
                for turn in turns
            ]
            scores[name] = sum(graded) / len(graded)
        return scores


async def run_sft(bench: Bench, rows: Sequence[Question], settings: RunConfig) -> ModelRef:
    """The base model: SFT on flawed demonstrations. Returns the checkpoint."""
    size, seed = settings.advanced.batch_size, settings.advanced.seed
    steps = len(rows) // size
    name = settings.experiment.model_path.removeprefix(PREFIX)
    model = ModelRef(kind="scratch", name=name, seed=seed)
    job = LearnerJob("sft", settings, model, total_steps=steps)
    first = await bench.engine.learner.initialize(job)
    last: StepResult = first
    for step in range(1, steps + 1):
        order = step_rows(seed, step=step, batch=size, num_rows=len(rows))
        talk = tuple(
            Conversation(row, (("user", rows[row].asked), ("assistant", rows[row].answer)))
            for row in order
        )
        batch = StepBatch(step, conversations=talk)
        last = await bench.engine.learner.step(job, batch, export_state=False)
    files = {**first.files, first.weights_name: last.state.weights}
    refs = {name: bench.put(sha256(c).hexdigest(), c) for name, c in files.items()}
    return ModelRef(kind="checkpoint", name=f"sft@{steps}", files=refs)


async def run_grpo(
    bench: Bench, model: ModelRef, rows: Sequence[Question], settings: RunConfig
) -> PolicyRef:
    """GRPO with LoRA on top of the checkpoint. Returns the last version."""
    size, seed = settings.training.rollout_batch_size, settings.advanced.seed
    steps = settings.advanced.max_steps or len(rows) // size
    job = LearnerJob("grpo", settings, model, total_steps=steps)
    learner = bench.engine.learner
    state = (await learner.initialize(job)).state
    times: list[tuple[float, float]] = []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        policy = PolicyRef(
            version=step - 1, weights=bench.put(state.weights_file_sha256, state.weights)
        )
        order = step_rows(seed, step=step, batch=size, num_rows=len(rows))
        prompts = [rows[row] for row in order]
        sampled = await bench.sample(
            model,
            policy,
            prompts,
            samples=settings.training.n_samples_per_prompt,
            temperature=settings.sampling.rollout_temperature,
            purpose="train",
            step=step,
            seed=seed,
        )
        generated = time.perf_counter()
        groups = tuple(
            _graded(slot, question, turns)
            for slot, (question, turns) in enumerate(zip(prompts, sampled, strict=True))
        )
        result = await learner.step(job, StepBatch(step, groups=groups), export_state=True)
        state = result.state
        times.append((generated - start, time.perf_counter() - generated))
        if step % 20 == 0:
            _progress(step, groups, result, times[-20:])
    return PolicyRef(version=steps, weights=bench.put(state.weights_file_sha256, state.weights))


def _progress(
    step: int,
    groups: Sequence[GradedGroup],
    result: StepResult,
    times: Sequence[tuple[float, float]],
) -> None:
    rewards = [r for g in groups for r in g.rewards if r is not None]
    print(
        f"  step {step:3d}  reward {sum(rewards) / len(rewards):.3f}"
        f"  generate {_median([g for g, _ in times]):.3f} s"
        f"  train {_median([t for _, t in times]):.3f} s"
        f"  entropy {result.metrics['train/entropy_loss']:.3f}"
        f"  mismatch {result.metrics['train/sampler_mismatch']:.1e}",
        flush=True,
    )


def _graded(slot: int, question: Question, turns: Sequence[Turn]) -> GradedGroup:
    samples = tuple(
        SampleRecord(
            index=i,
            text=turn.text,
            sequences=sequences_of((turn,)),
            truncated=turn.finish_reason == "length",
        )
        for i, turn in enumerate(turns)
    )
    return GradedGroup(slot, samples, tuple(question.reward(turn) for turn in turns))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


async def story(
    seed: int, *, threads: int, deterministic: bool, override: Mapping[str, float]
) -> dict[str, object]:
    """SFT, evaluation, GRPO, evaluation."""
    bench = Bench(threads=threads, deterministic=deterministic)
    rows = data(seed)
    start = time.perf_counter()
    sft = config("sft", seed=seed, deterministic=deterministic)
    model = await run_sft(bench, rows["sft"], sft)
    sft_s = time.perf_counter() - start
    before = await bench.accuracy(model, PolicyRef(version=0), rows["heldout"], seed)
    print(f"seed {seed}: SFT {sft_s:.1f} s, held out {before}", flush=True)
    start = time.perf_counter()
    grpo = config("grpo", seed=seed, deterministic=deterministic, **override)
    policy = await run_grpo(bench, model, rows["rl"], grpo)
    rl_s = time.perf_counter() - start
    after = await bench.accuracy(model, policy, rows["heldout"], seed)
    print(f"seed {seed}: GRPO {rl_s:.1f} s, held out {after}", flush=True)
    await bench.engine.aclose()
    return {"seed": seed, "before": before, "after": after, "sft_s": sft_s, "rl_s": rl_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument(
        "--grpo", nargs="*", default=[], metavar="KEY=VALUE", help="try other values"
    )
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.2f}, {asked.threads} threads")
    override = {key: json.loads(value) for key, _, value in (p.partition("=") for p in asked.grpo)}
    for seed in asked.seed:
        told = story(
            seed, threads=asked.threads, deterministic=asked.deterministic, override=override
        )
        print(json.dumps(asyncio.run(told)), flush=True)


if __name__ == "__main__":
    main()
