"""The arithmetic recipe with bare loops: SFT from nothing, then GRPO, with no platform around them.

    python bench/recipe.py --seed 0

It is the story that `headrace demo` tells, told by engine calls alone: what it reaches here is what
the platform must reach, and the seconds it takes here are what the platform's tax is measured
against. Two-digit addition whose units carry; a third of the demonstrations carry, the others forget
it. RL
selects the right habit; it does not teach addition.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from hashlib import sha256

from schemas.config import RunConfig
from schemas.learning import Conversation, GradedGroup, LearnerJob, StepBatch, StepResult
from schemas.sampling import (
    ArtifactRef,
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

Pair = tuple[int, int]

CAREFUL = 0.33
NUM_HELD_OUT = 128
SFT_ROWS = 13_440
MODEL = "qwen3-2m"


def pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All two-digit pairs whose units carry: (training, held out), split by unordered pair."""
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 >= 10]
    random.Random(seed).shuffle(unordered)  # noqa: S311
    held_out, training = unordered[:NUM_HELD_OUT], unordered[NUM_HELD_OUT:]
    both = [p for a, b in training for p in {(a, b), (b, a)}]
    return both, held_out


def question(pair: Pair) -> str:
    return f"What is {pair[0]} + {pair[1]}?"


def demonstration(pair: Pair, *, careful: bool) -> str:
    """units + tens = answer; a careless one forgets the carry."""
    units, tens = pair[0] % 10 + pair[1] % 10, (pair[0] // 10 + pair[1] // 10) * 10
    return f"{units}+{tens}={tens + units - (0 if careful else 10)}"


def reward(pair: Pair, turn: Turn) -> float:
    """1 if the text after the last `=` is the sum and the answer ended."""
    ended = turn.finish_reason == "stop" and "=" in turn.text
    return float(ended and turn.text.rpartition("=")[2] == str(sum(pair)))


def config(algorithm: str, seed: int, *, steps: int, deterministic: bool) -> RunConfig:
    """The run TOMLs of the recipe, as values."""
    sft = algorithm == "sft"
    advanced = {
        "algorithm": algorithm,
        "seed": seed,
        "deterministic": deterministic,
        "tuning": "full" if sft else "lora",
        "lora_rank": 16,
        "lora_alpha": 32.0,
        "warmup_steps": 20 if sft else 5,
        "lr_schedule": "cosine" if sft else "linear",
        "lr_min_ratio": 0.1 if sft else 0.0,
        "grad_clip": 1.0 if sft else 0.3,
        "batch_size": 64,
        "max_sequence_length": 64,
        "max_steps": steps,
    }
    return RunConfig.model_validate(
        {
            "experiment": {
                "rollout": "arithmetic",
                "entrypoint": "main.py",
                "model_path": f"scratch:{MODEL}",
                "dataset": "arithmetic",
            },
            "training": {
                "lr": 1e-3,
                "n_samples_per_prompt": 8,
                "rollout_batch_size": 16,
                "max_prompt_length": 32,
                "max_response_length": 12,
            },
            "advanced": advanced,
        }
    )


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
        prompts: Sequence[Pair],
        *,
        samples: int,
        temperature: float,
        purpose: str,
        step: int,
        seed: int,
    ) -> list[list[Turn]]:
        params = SamplingParams(
            temperature=temperature,
            max_prompt_tokens=32,
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
                messages=(Message(role="user", content=question(pair)),),
            )
            for slot, pair in enumerate(prompts)
            for i in range(samples)
        ]
        turns = await asyncio.gather(*(self.engine.sampler.sample(r) for r in requests))
        return [list(turns[i : i + samples]) for i in range(0, len(turns), samples)]

    async def accuracy(
        self, model: ModelRef, policy: PolicyRef, held_out: Sequence[Pair], seed: int
    ) -> dict[str, float]:
        scores: dict[str, float] = {}
        for name, temperature, samples in (("greedy", 0.0, 1), ("sampled", 1.0, 4)):
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
                reward(pair, turn) for pair, g in zip(held_out, groups, strict=True) for turn in g
            ]
            scores[name] = sum(graded) / len(graded)
        return scores


async def run_sft(bench: Bench, training: Sequence[Pair], seed: int) -> ModelRef:
    """The base model: SFT on flawed demonstrations. Returns the checkpoint."""
    draw = random.Random(seed + 1)  # noqa: S311
    rows = [draw.choice(training) for _ in range(SFT_ROWS)]
    lines = [(question(p), demonstration(p, careful=draw.random() < CAREFUL)) for p in rows]
    steps = SFT_ROWS // 64
    settings = config("sft", seed, steps=steps, deterministic=bench.deterministic)
    job = LearnerJob(
        "sft", settings, ModelRef(kind="scratch", name=MODEL, seed=seed), total_steps=steps
    )
    first = await bench.engine.learner.initialize(job)
    last: StepResult = first
    for step in range(1, steps + 1):
        chunk = lines[(step - 1) * 64 : step * 64]
        talk = tuple(
            Conversation(i, (("user", asked), ("assistant", said)))
            for i, (asked, said) in enumerate(chunk)
        )
        batch = StepBatch(step, conversations=talk)
        last = await bench.engine.learner.step(job, batch, export_state=False)
    files = {**first.files, first.weights_name: last.state.weights}
    refs = {name: bench.put(sha256(c).hexdigest(), c) for name, c in files.items()}
    return ModelRef(kind="checkpoint", name=f"sft@{steps}", files=refs)


async def run_grpo(
    bench: Bench,
    model: ModelRef,
    training: Sequence[Pair],
    *,
    seed: int,
    steps: int,
) -> PolicyRef:
    """GRPO with LoRA on top of the checkpoint. Returns the last version."""
    settings = config("grpo", seed, steps=steps, deterministic=bench.deterministic)
    job = LearnerJob("grpo", settings, model, total_steps=steps)
    learner = bench.engine.learner
    state = (await learner.initialize(job)).state
    draw = random.Random(seed + 2)  # noqa: S311
    times: list[tuple[float, float]] = []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        policy = PolicyRef(version=step - 1, weights=bench.put(state.weights_sha256, state.weights))
        prompts = draw.sample(list(training), 16)
        sampled = await bench.sample(
            model,
            policy,
            prompts,
            samples=8,
            temperature=1.0,
            purpose="train",
            step=step,
            seed=seed,
        )
        generated = time.perf_counter()
        groups = tuple(
            _graded(slot, pair, turns)
            for slot, (pair, turns) in enumerate(zip(prompts, sampled, strict=True))
        )
        result = await learner.step(job, StepBatch(step, groups=groups), export_state=True)
        state = result.state
        times.append((generated - start, time.perf_counter() - generated))
        if step % 10 == 0:
            rewards = [r for g in groups for r in g.rewards if r is not None]
            print(
                f"  step {step:3d}  reward {sum(rewards) / len(rewards):.3f}"
                f"  generate {_median([g for g, _ in times[-10:]]):.3f} s"
                f"  train {_median([t for _, t in times[-10:]]):.3f} s"
                f"  entropy {result.metrics['train/entropy_loss']:.3f}"
                f"  mismatch {result.metrics['train/sampler_mismatch']:.1e}",
                flush=True,
            )
    return PolicyRef(version=steps, weights=bench.put(state.weights_sha256, state.weights))


def _graded(slot: int, pair: Pair, turns: Sequence[Turn]) -> GradedGroup:
    samples = tuple(
        SampleRecord(
            index=i,
            text=turn.text,
            sequences=sequences_of((turn,)),
            truncated=turn.finish_reason == "length",
        )
        for i, turn in enumerate(turns)
    )
    return GradedGroup(slot, samples, tuple(reward(pair, turn) for turn in turns))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


async def story(seed: int, *, steps: int, threads: int, deterministic: bool) -> dict[str, object]:
    """SFT, evaluation, GRPO, evaluation."""
    bench = Bench(threads=threads, deterministic=deterministic)
    training, held_out = pairs(seed)
    start = time.perf_counter()
    model = await run_sft(bench, training, seed)
    sft_s = time.perf_counter() - start
    before = await bench.accuracy(model, PolicyRef(version=0), held_out, seed)
    print(f"seed {seed}: SFT {sft_s:.1f} s, held out {before}", flush=True)
    start = time.perf_counter()
    policy = await run_grpo(bench, model, training, seed=seed, steps=steps)
    rl_s = time.perf_counter() - start
    after = await bench.accuracy(model, policy, held_out, seed)
    print(f"seed {seed}: GRPO {rl_s:.1f} s, held out {after}", flush=True)
    await bench.engine.aclose()
    return {"seed": seed, "before": before, "after": after, "sft_s": sft_s, "rl_s": rl_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.2f}, {asked.threads} threads")
    for seed in asked.seed:
        told = story(
            seed, steps=asked.steps, threads=asked.threads, deterministic=asked.deterministic
        )
        print(json.dumps(asyncio.run(told)))


if __name__ == "__main__":
    main()
