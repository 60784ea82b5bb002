"""B19, attestation: what the test of samples costs in a step, how soon it finds each mistake, and how
often it errs.

The cost is measured on GRPO steps of 3.7M parameters (LoRA r16, 8 groups of 16 samples of 64 tokens), in
sync mode, and in an asynchronous mode, where some samples are computed again with the version that made
them. It is the processor time inside of the witness, because two steps differ by more than that. False
alarms are counted over real noise (a base in bfloat16 against float32) and over simulated noise with
heavy tails, whose mean is exactly the bound.
"""

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from schemas.learner import StepBatch
from schemas.sampling import ModelRef
from tests.unit.trainer.objective.test_attestation import (
    MISTAKES,
    build_world,
    graded,
    tokens_until_refuted,
)
from tests.unit.trainer.support import Shelf, job, request
from trainer.engine import Engine
from trainer.objective import attestation
from trainer.objective.attestation import (
    ALPHA,
    EXACT_BOUND,
    SLACK,
    Witness,
    distance_terms,
    draw_terms,
    log_wealth,
)

MODEL = ModelRef(kind="scratch", name="qwen3-4m", seed=1)
GROUPS, SAMPLES, TOKENS = 8, 16, 64


async def measure_cost(steps: int) -> None:
    """Print the seconds of a step, and the share of the test in them."""
    shelf = Shelf()
    engine = Engine(fetch=shelf.fetch, threads=1)
    asked = job(MODEL, lora_rank=16)
    first = await engine.learner.initialize(asked)
    policy = shelf.policy(first.state)
    groups = []
    for slot in range(GROUPS):
        asks = [
            request(
                f"q{slot}", sample=i, slot=slot, policy=policy, model=MODEL, max_new_tokens=TOKENS
            )
            for i in range(SAMPLES)
        ]
        turns = list(await asyncio.gather(*(engine.sampler.sample(ask) for ask in asks)))
        group = graded(turns, tuple(float(i % 3) for i in range(SAMPLES)))
        groups.append(replace(group, slot=slot))
    kinds = {
        "without": {"attests": False},
        "sync": {"attests": True},
        "asynchronous": {"attests": True, "sampled": policy},
        "asynchronous, tenth step": {"attests": True, "sampled": policy},
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    shares: dict[str, float] = {}
    spent = count_seconds()
    shares_of_step: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(steps):
        for kind, given in kinds.items():
            await engine.learner.initialize(asked)
            attestation.EVERY = 1 if "tenth" in kind else 10
            batch = StepBatch(1, groups=tuple(groups), **given)  # type: ignore[arg-type]  # by kind
            began, spent[0] = time.process_time(), 0.0
            result = await engine.learner.step(
                asked, batch, export_state=False, export_weights=False
            )
            seconds[kind].append(time.process_time() - began)
            shares_of_step[kind].append(spent[0] / seconds[kind][-1])
            shares[kind] = result.metrics.get("attest/share", 0.0)
    for kind, found in seconds.items():
        print(
            f"{kind}: a step of {statistics.median(found):.3f} CPU s, of which the test takes "
            f"{statistics.median(shares_of_step[kind]):.3%}; share of tokens {shares[kind]:.3f}"
        )
    await engine.aclose()


def count_seconds() -> list[float]:
    """Count the seconds inside of all witnesses, in the only item of the list."""
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given)
            finally:
                spent[0] += time.thread_time() - began

        return run

    see, judge = Witness.see, Witness.judge
    inner = timed(see)

    def judged(witness: Witness) -> dict[str, float]:
        Witness.see = see  # type: ignore[method-assign]  # judge calls it, and is timed as a whole
        try:
            return timed(judge)(witness)  # type: ignore[no-any-return]  # as judge does
        finally:
            Witness.see = inner  # type: ignore[method-assign]  # of the next step

    Witness.see = inner  # type: ignore[method-assign]  # to measure it
    Witness.judge = judged  # type: ignore[method-assign]  # to measure it
    return spent


async def measure_power() -> None:
    """Print after how many tokens each mistake is found."""
    world = await build_world()
    noise = float((world.server({}) - world.learner({}))[:32].abs().mean())
    right = world.learner(world.newest)
    print(
        f"noise of bfloat16: {noise:.2g}; of float32: {float((world.recorded - right).abs().mean()):.2g}"
    )
    for mistake, made in MISTAKES.items():
        single = tokens_until_refuted(made(world, world.learner) - right, EXACT_BOUND)
        half = tokens_until_refuted(made(world, world.server) - right, SLACK * noise)
        size = float((made(world, world.learner) - right).abs().mean())
        print(f"{mistake}: mean distance {size:.2g}, float32 {single:g}, bfloat16 {half:g} tokens")
    honest = world.server(world.newest) - right
    print(f"honest in bfloat16: {tokens_until_refuted(honest, SLACK * noise):g}")
    real = honest.abs().numpy()
    count_alarms("real bfloat16 noise", real / (SLACK * noise))


def count_alarms(name: str, real: np.ndarray | None = None, tokens: int = 10_000_000) -> None:
    """Print the false alarms over `tokens` tokens in samples of 64, 512 and all in one."""
    draws = np.random.default_rng(1)
    makers = {
        "student (2 degrees of freedom)": lambda n: np.abs(draws.standard_t(2, n)),
        "lognormal (sigma 1.5)": lambda n: draws.lognormal(0, 1.5, n),
        "normal": lambda n: np.abs(draws.standard_normal(n)),
    }
    if real is not None:
        makers = {name: lambda n: draws.choice(real, n)}
    for kind, make in makers.items():
        alarms, most = 0, -math.inf
        for _ in range(tokens // 1_000_000):
            noise = make(1_000_000)
            ratio_E = torch.from_numpy(noise if real is not None else noise / noise.mean())
            for size in (64, 512, len(ratio_E)):
                starts = range(0, len(ratio_E), size)
                wealth_E = log_wealth(distance_terms(ratio_E), list(starts))
                alarms += int((wealth_E >= -math.log(ALPHA)).sum())
                most = max(most, float(wealth_E.max()))
        print(f"{kind}: {alarms} alarms in {tokens:,} tokens, log wealth at most {most:.1f}")


def count_draw_alarms(tokens: int) -> None:
    """Print the false alarms of the test of the draws over real draws of random distributions."""
    generator = torch.Generator().manual_seed(3)
    most = -math.inf
    for _ in range(tokens // 100_000):
        logits_E_V = torch.randn(100_000, 100, generator=generator) * 3
        logprobs_E_V = logits_E_V.log_softmax(-1)
        drawn_E = torch.multinomial(logprobs_E_V.exp(), 1, generator=generator)
        loss_E = -logprobs_E_V.gather(1, drawn_E)[:, 0].double()
        entropy_E = -(logprobs_E_V.exp() * logprobs_E_V).sum(-1).double()
        for size in (64, 512):
            starts = list(range(0, 100_000, size))
            most = max(most, float(log_wealth(draw_terms(loss_E, entropy_E, 100), starts).max()))
    print(f"draws: log wealth at most {most:.1f} of {-math.log(ALPHA):.1f} in {tokens:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    given = parser.parse_args()
    asyncio.run(measure_cost(given.steps))
    asyncio.run(measure_power())
    count_alarms("simulated", tokens=given.tokens)
    count_draw_alarms(given.tokens)


if __name__ == "__main__":
    main()
