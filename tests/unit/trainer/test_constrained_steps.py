"""Steps that learn from constrained answers without advantages: every distribution that they compare is
over the tokens that an answer could have."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.learner import GradedGroup, StepBatch
from schemas.models.constraints import Constraint
from schemas.models.teacher import TeacherRef
from schemas.sampling import SampleRecord, Turn, sequences_of
from tests.unit.trainer.sampler.test_constraints import FORMAT, constrained
from tests.unit.trainer.support import TINY, job
from trainer.engine import Engine

ONLY = Constraint(json_schema=json.dumps({"const": "green"}))
"""A schema that leaves no choice."""
OTHER = TINY.model_copy(update={"seed": 7})


async def batch_of(engine: Engine, constraint: Constraint) -> StepBatch:
    """A group of four answers, the first of which is the best and the second the worst."""
    turns: list[Turn] = [
        await engine.sampler.sample(constrained(constraint, sample=n)) for n in range(4)
    ]
    samples = tuple(
        SampleRecord(index=n, sequences=sequences_of((turn,))) for n, turn in enumerate(turns)
    )
    return StepBatch(step=1, groups=(GradedGroup(0, samples, (1.0, 0.0, 0.5, 0.5)),))


async def metrics_of(engine: Engine, batch: StepBatch, **advanced: Any) -> dict[str, float]:
    asked = job(**advanced)
    if advanced["algorithm"] == "distill":
        asked = replace(asked, teacher=TeacherRef(name="other", model=OTHER))
    await engine.learner.initialize(asked)
    result = await engine.learner.step(asked, batch, export_state=False)
    return dict(result.metrics)


DISTILL = {"algorithm": "distill", "teacher": "other"}


@pytest.mark.parametrize("advanced", [{"algorithm": "online_dpo"}, DISTILL])
async def test_constrained_answers_are_learned_at_the_samplers_logprobs(
    engine: Engine, advanced: dict[str, Any]
) -> None:
    found = await metrics_of(engine, await batch_of(engine, FORMAT), **advanced)
    assert found["train/sampler_mismatch"] < 1e-5
    assert found["train/loss"] > 0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
async def test_a_teacher_says_nothing_where_a_grammar_leaves_no_choice(
    engine: Engine, beta: float
) -> None:
    found = await metrics_of(engine, await batch_of(engine, ONLY), **DISTILL, distill_beta=beta)
    assert (found["train/loss"], found["train/teacher_kl"]) == (0.0, 0.0)
    assert found["train/grad_norm"] == 0.0
