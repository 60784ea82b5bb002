"""Steps of rows that share more than their contexts: every algorithm learns what it learns from rows of
their own, from fewer tokens."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.learner import RULES, Preference, StepBatch
from schemas.models.constraints import Constraint
from schemas.models.teacher import TeacherRef
from schemas.sampling import sequences_of
from tests.unit.trainer.algorithms.test_registry import trained
from tests.unit.trainer.batches import REASONED, policy64
from tests.unit.trainer.distillation import test_step as distillation
from tests.unit.trainer.preferences import test_step as preferences
from tests.unit.trainer.sampler.test_constraints import constrained, policy_of
from tests.unit.trainer.support import TINY, job
from tests.unit.trainer.variants import VARIANTS
from trainer.algorithms.sft import Demonstrations, accumulate_gradients
from trainer.engine import Engine
from trainer.forward.ops import Forward
from trainer.forward.packing import Example, pack
from trainer.objective.batch import examples_of, with_masks


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_learns_what_it_learns_from_rows_of_their_own(variant: str) -> None:
    whole, metrics = trained(policy64(), variant, REASONED)
    assert any(float(gradient.abs().max()) > 0 for gradient in whole.values())
    single, seen = trained(policy64(), variant, REASONED, micro_batch_tokens=1)
    for key, value in metrics.items():
        assert seen[key] == pytest.approx(value, abs=1e-9), key
    assert whole.keys() == single.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(single[name], gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("tokens", [40, 60, 90, 150])
def test_parts_of_a_tree_learn_what_the_whole_does(tokens: int) -> None:
    whole, _ = trained(policy64(), "gspo", REASONED)
    parts, _ = trained(policy64(), "gspo", REASONED, micro_batch_tokens=tokens)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_learns_what_it_learns_from_rows_of_their_own(beta: float) -> None:
    policy = policy64()
    teacher = distillation.moved(policy)
    metrics, gradients, whole = distillation.taken(
        policy, distillation.run_with(teacher, beta=beta), REASONED
    )
    split, others, plan = distillation.taken(
        policy, distillation.run_with(teacher, beta=beta, tokens=1), REASONED
    )
    assert sum(whole) < sum(plan)
    assert split == pytest.approx(metrics, abs=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=0)


LIKE = (
    Preference(0, (("user", "1?"),), "that is one, of course", "that is one, of two"),
    Preference(1, (("user", "2?"),), "the second of all of them", "the second of all"),
    Preference(2, (("user", "what is 3+4?"),), "7", "seven and nothing else", margin=0.5),
)


@pytest.mark.parametrize("variant", ["dpo", "dpo, ipo", "kto", "orpo", "simpo", "reward_model"])
def test_answers_that_begin_alike_are_compared_as_rows_of_their_own(variant: str) -> None:
    policy, keys = preferences.policy_of(variant), preferences.VARIANTS[variant]
    metrics, gradients, (shared,) = preferences.taken(
        policy, preferences.run_of(policy, **keys), LIKE
    )
    apart = replace(policy, forward=Forward(shares_prefixes=False))
    plain, others, (single,) = preferences.taken(apart, preferences.run_of(apart, **keys), LIKE)
    assert shared < single - 30
    assert plain == pytest.approx(metrics, abs=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=0)


def test_conversations_are_learned_as_rows_of_their_own() -> None:
    examples = examples_of(REASONED)
    batch = Demonstrations(examples, len(examples), num_cut=0, num_lost=0)
    found = []
    for tokens in (4096, 1):
        policy = policy64()
        metrics, plan = accumulate_gradients(policy, batch, micro_batch_tokens=tokens)
        gradients = {n: t.grad for n, t in policy.tensors.items() if t.grad is not None}
        found.append((metrics, gradients, sum(plan)))
    (metrics, gradients, shared), (plain, others, single) = found
    assert shared < 0.6 * single
    assert plain == pytest.approx(metrics, abs=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=0)


SCHEMAS = ["the one and only answer", "the one and only other"]


async def test_constrained_answers_that_begin_alike_keep_their_masks(engine: Engine) -> None:
    """Where the answers part, the grammar allows the first letters of both."""
    choice = Constraint(json_schema=json.dumps({"enum": SCHEMAS}))
    asked = [constrained(choice, sample=n) for n in range(4)]
    turns = [await engine.sampler.sample(one) for one in asked]
    assert len({turn.text for turn in turns}) == 2, "both are drawn"
    policy = await policy_of(engine, asked[0])
    rows = [Example(n, row) for n, turn in enumerate(turns) for row in sequences_of((turn,))]
    (micro,) = pack(with_masks(rows, policy), micro_batch_tokens=4096, share=True)
    assert micro.num_tokens < 0.5 * sum(len(row.sequence.tokens) for row in rows)
    logprobs, _ = policy.logprobs(micro, temperature=1.0)
    torch.testing.assert_close(logprobs, micro.behaviour_M.float(), atol=1e-5, rtol=0)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.05},
    "grpo in blocks": {"deterministic": True},
    "ppo": {"algorithm": "ppo"},
    "online_dpo": {"algorithm": "online_dpo"},
    "distill": {"algorithm": "distill", "teacher": "other"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_a_run_keeps_what_its_rules_share(engine: Engine, name: str) -> None:
    """Both compute the same up to rounding. A run that goes on has the bits of one that did not stop."""
    plans, losses = {}, {}
    for rules in (5, RULES):
        asked = replace(job(run=f"{name}{rules}", **ALGORITHMS[name]), rules=rules)
        if name == "distill":
            other = TINY.model_copy(update={"seed": 7})
            asked = replace(asked, teacher=TeacherRef(name="other", model=other))
        zero = await engine.learner.initialize(asked)
        batch = StepBatch(1, groups=REASONED)
        result = await engine.learner.step(asked, batch, export_state=True)
        plans[rules], losses[rules] = sum(result.plan), result.metrics["train/loss"]
        await engine.learner.load(asked, zero.state)
        again = await engine.learner.step(asked, batch, export_state=True)
        assert again.state == result.state
        assert result.versions["rules"] == str(rules)
    assert plans[RULES] < 0.6 * plans[5]
    assert losses[RULES] == pytest.approx(losses[5], abs=1e-5)


def test_one_token_is_learned_by_several_rows_and_read_by_others() -> None:
    """The case that the batch of these tests is made for."""
    rows = [row.sequence for row in examples_of(REASONED[:1])]
    prompt = rows[0].tokens[:19]
    assert all(row.tokens[:19] == prompt for row in rows)
    learned = [row for row in rows if row.tokens[19] == 40 and row.loss_mask[19]]
    read = [row for row in rows if row.tokens[19] == 40 and not row.loss_mask[19]]
    assert (len(learned), len(read), len({row.logprobs[19] for row in learned})) == (2, 2, 2)
