"""The entropy bonus: its gradient through every pass, whose entropy counts, and the weight that follows
a target."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.config import LossAggregation
from schemas.errors import CorruptData
from tests.unit.trainer.batches import MIXED, policy64
from tests.unit.trainer.support import job
from tests.unit.trainer.test_learner import play
from trainer import grpo
from trainer.engine import Engine
from trainer.forward.ops import Forward
from trainer.objective.entropy import EntropyControl, load_control
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import Policy

COEF = 0.3


def gradients(policy: Policy, hyperparameters: Hyperparameters) -> dict[str, torch.Tensor]:
    for tensor in policy.tensors.values():
        tensor.grad = None
    batch = grpo.prepare_batch(
        policy, MIXED, objective=grpo.OBJECTIVE, hyperparameters=hyperparameters
    )
    grpo.accumulate_gradients(policy, batch)
    return {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}


def bonus_by_hand(policy: Policy, hyperparameters: Hyperparameters) -> dict[str, torch.Tensor]:
    """The gradient of the weighted entropy, by autograd on the logits of all actions."""
    batch = grpo.prepare_batch(
        policy, MIXED, objective=grpo.OBJECTIVE, hyperparameters=hyperparameters
    )
    total = torch.zeros((), dtype=torch.float64)
    for micro, values in batch.micro_batches(policy):
        every = (policy.logits(micro) / hyperparameters.temperature).log_softmax(-1)
        total = total - (values["weight"][:, None] * every.exp() * every).sum()
    names = sorted(policy.tensors)
    found = torch.autograd.grad(total, [policy.tensors[name] for name in names])
    return dict(zip(names, found, strict=True))


PASSES = {
    "native": Forward(),
    "torch": Forward(allows_native=False),
    "recompute": Forward(recompute=True),
}


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_gradient_of_the_bonus_is_that_of_all_logits(
    which: str, aggregation: LossAggregation
) -> None:
    """To 1e-9, whichever pass computes the hidden states."""
    policy = replace(policy64(), forward=PASSES[which])
    if which == "native" and policy.kernels == "torch":
        pytest.skip("no compiler for the pass in C")
    plain = Hyperparameters(
        aggregation=aggregation, temperature=0.7, max_response_length=8, micro_batch_tokens=20
    )
    expected = bonus_by_hand(policy, plain)
    without = gradients(policy, plain)
    found = gradients(policy, replace(plain, entropy_coef=COEF))
    for name, slope in expected.items():
        assert float(slope.abs().max()) > 1e-6, name
        torch.testing.assert_close(
            found[name], without[name] - COEF * slope, atol=1e-9, rtol=0, msg=name
        )


def test_the_bonus_through_transformers_is_the_same() -> None:
    """To 1e-6, because its norms round to fp32."""
    own = replace(policy64(), forward=PASSES["torch"])
    theirs = policy64()
    theirs = replace(theirs, loaded=replace(theirs.loaded, decoder=None))
    asked = Hyperparameters(entropy_coef=10.0, max_response_length=8)
    ours, others = gradients(own, asked), gradients(theirs, asked)
    without = gradients(theirs, replace(asked, entropy_coef=0.0))
    for name, gradient in ours.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-6, rtol=0)
    assert any(float((others[n] - without[n]).abs().max()) > 1e-3 for n in others)


def test_without_a_bonus_the_entropy_has_no_gradient() -> None:
    policy = policy64()
    batch = grpo.prepare_batch(
        policy, MIXED, objective=grpo.OBJECTIVE, hyperparameters=Hyperparameters()
    )
    for micro, _ in batch.micro_batches(policy):
        assert not policy.logprobs(micro, temperature=1.0)[1].requires_grad
        assert policy.logprobs(micro, temperature=1.0, trains_entropy=True)[1].requires_grad


def test_a_masked_sample_has_no_bonus() -> None:
    """All samples are cut off and masked: nothing is left that pulls at the policy."""
    groups = tuple(
        replace(g, samples=tuple(s.model_copy(update={"truncated": True}) for s in g.samples))
        for g in MIXED
    )
    policy = policy64()
    masked = Hyperparameters(entropy_coef=COEF, mask_truncated=True)
    for hyperparameters, is_moved in (
        (masked, False),
        (replace(masked, mask_truncated=False), True),
    ):
        for tensor in policy.tensors.values():
            tensor.grad = None
        batch = grpo.prepare_batch(
            policy, groups, objective=grpo.OBJECTIVE, hyperparameters=hyperparameters
        )
        grpo.accumulate_gradients(policy, batch)
        found = [t.grad for t in policy.tensors.values() if t.grad is not None]
        assert any(bool(gradient.any()) for gradient in found) == is_moved


ADVANCED = job(entropy_coef=0.02, entropy_target=0.5, entropy_coef_delta=0.01).config.advanced


def test_a_step_that_changes_nothing_does_not_move_the_weight() -> None:
    control = EntropyControl(0.02, 0.3)
    assert control.after({"train/entropy_loss": 0.1, "train/skipped": 1.0}, ADVANCED) == control
    assert control.after({"train/entropy_loss": math.nan}, ADVANCED) == control
    assert control.after({}, ADVANCED) == control
    assert control.after({"train/entropy_loss": 0.1}, ADVANCED) == EntropyControl(0.03, 0.1)


def test_the_control_survives_its_state_and_says_when_it_is_lost() -> None:
    for control in (EntropyControl(0.1 + 0.2, 0.3), EntropyControl(0.02)):
        assert load_control(control.state()) == control
    with pytest.raises(CorruptData, match="no weight of the entropy bonus"):
        load_control({})


async def steps(engine: Engine, number: int, **advanced: Any) -> list[dict[str, float]]:
    """The metrics of the first steps of a run."""
    asked = job(run=str(sorted(advanced.items())), **advanced)
    await engine.learner.initialize(asked)
    return [
        (await engine.learner.step(asked, play(step), export_state=False)).metrics
        for step in range(1, number + 1)
    ]


async def test_a_run_below_its_target_gets_a_bonus_that_grows_from_its_second_step(
    engine: Engine,
) -> None:
    found = await steps(engine, 4, entropy_target=9.0, entropy_coef_delta=0.5)
    assert [one["train/entropy_coef"] for one in found] == [0.0, 0.5, 1.0, 1.0]
    plain = await steps(engine, 4)
    assert found[0] == plain[0] | {"train/entropy_coef": 0.0}
    assert found[2]["train/entropy_loss"] > plain[2]["train/entropy_loss"]


async def test_a_run_above_its_target_is_the_run_without_a_bonus(engine: Engine) -> None:
    found = await steps(engine, 3, entropy_coef=0.9, entropy_target=0.1)
    plain = await steps(engine, 3)
    assert found == [one | {"train/entropy_coef": 0.0} for one in plain]


async def test_the_state_of_a_run_with_a_target_fits_no_other_run(engine: Engine) -> None:
    one, other = job(entropy_target=9.0), job(run="other")
    state = (await engine.learner.initialize(one)).state
    with pytest.raises(CorruptData, match="entropy"):
        await engine.learner.load(other, state)
    with pytest.raises(CorruptData, match="entropy"):
        await engine.learner.load(one, (await engine.learner.initialize(other)).state)
