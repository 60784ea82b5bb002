"""A sampler and a learner with random delays, so that calls finish in a random order. A run whose bits
depended on that order would be detected."""

import asyncio
import random
from collections.abc import Sequence

from schemas.learner import (
    GradientComparison,
    LearnedRow,
    Learner,
    LearnerJob,
    LearnerState,
    StepBatch,
    StepResult,
)
from schemas.sampling import Sampler, SampleRequest, Turn

LONGEST_S = 0.25
"""About as long as a few steps of the tiny model."""


class RandomLatencySampler:
    """`schemas.sampling.Sampler` with delays drawn from `seed`."""

    def __init__(self, inner: Sampler, seed: int) -> None:
        self._inner = inner
        self._draw = random.Random(f"sampler/{seed}")

    async def prepare(self, request: SampleRequest) -> None:
        await self._inner.prepare(request)

    async def sample(self, request: SampleRequest) -> Turn:
        await asyncio.sleep(self._draw.uniform(0, LONGEST_S))
        turn = await self._inner.sample(request)
        await asyncio.sleep(self._draw.uniform(0, LONGEST_S))
        return turn


class RandomLatencyLearner:
    """`schemas.learner.Learner` with delays drawn from `seed`."""

    def __init__(self, inner: Learner, seed: int) -> None:
        self._inner = inner
        self._draw = random.Random(f"learner/{seed}")

    async def initialize(self, job: LearnerJob) -> StepResult:
        return await self._inner.initialize(job)

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        return self._inner.holds(job, step, weights_sha256, state_sha256)

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        await self._inner.load(job, state)

    async def evaluate(
        self, job: LearnerJob, step: int, rows: Sequence[LearnedRow]
    ) -> dict[str, float]:
        return await self._inner.evaluate(job, step, rows)

    async def compare_gradients(
        self, job: LearnerJob, before: StepBatch, after: StepBatch
    ) -> GradientComparison:
        return await self._inner.compare_gradients(job, before, after)

    async def step(
        self,
        job: LearnerJob,
        batch: StepBatch,
        *,
        export_state: bool,
        export_weights: bool = True,
    ) -> StepResult:
        await asyncio.sleep(self._draw.uniform(0, LONGEST_S))
        return await self._inner.step(
            job, batch, export_state=export_state, export_weights=export_weights
        )
