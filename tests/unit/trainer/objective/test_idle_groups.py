"""Groups without a gradient are measured and not trained, and that changes no gradient."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.learner import RULES, GradedGroup, StepBatch
from tests.unit.trainer.algorithms.test_registry import chosen, gradients, moved, prepare
from tests.unit.trainer.batches import GROUPS, MIXED, group, policy64
from tests.unit.trainer.support import job
from tests.unit.trainer.test_learner import play
from tests.unit.trainer.variants import VARIANTS
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.engine import Engine
from trainer.objective.objective import Actions
from trainer.objective.sequences import Rows

EQUAL = (*MIXED, group(4, (0.5, 0.5, 0.5)), group(5, (None, 1.0)), group(6, (0.0, 1.0), empty=0))


def is_trained(variant: str, groups: Sequence[GradedGroup], **changes: Any) -> list[bool]:
    """Whether each micro-batch has a gradient, for passes of at most one group."""
    policy, (objective, hyperparameters) = policy64(), chosen(variant)
    made = replace(hyperparameters, micro_batch_tokens=1, **changes)
    batch = prepare(policy, groups, objective, made)
    seen = [
        (set(micro.sample_M.tolist()), micro.has_gradient)
        for micro, _ in batch.micro_batches(policy)
    ]
    assert all(has_gradient != bool(samples & batch.idle) for samples, has_gradient in seen)
    return [has_gradient for _, has_gradient in seen]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_action_without_an_advantage_has_no_slope(name: Any) -> None:
    """Except where the objective selected it, or trains something besides."""
    generator = torch.Generator().manual_seed(1)
    logprob_M = -5 * torch.rand(64, generator=generator, dtype=torch.float64)
    against_M = -5 * torch.rand(64, generator=generator, dtype=torch.float64)
    advantage_M = torch.randn(64, generator=generator, dtype=torch.float64)
    advantage_M[::2] = 0
    leaf_M = logprob_M.requires_grad_()
    # Rows of 4 actions: all of a row have an advantage, or none.
    row_M = torch.arange(64) % 2 * 8 + torch.arange(64) // 8
    actions = Actions(leaf_M, leaf_M - against_M, advantage_M, Rows(row_M, 16), torch.zeros(64))
    loss_M, _ = OBJECTIVES[name].loss(actions, OBJECTIVES[name].defaults)
    (slope_M,) = torch.autograd.grad(loss_M.sum(), leaf_M)
    assert (slope_M[::2] == 0).all()
    assert (slope_M[1::2] != 0).any(), "twin: the others have one"


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_metrics_are_those_of_training_all(variant: str) -> None:
    objective, hyperparameters = chosen(variant)
    found = [
        gradients(
            moved(policy := policy64()),
            prepare(policy, EQUAL, objective, replace(hyperparameters, skips_idle_groups=skips)),
        )
        for skips in (True, False)
    ]
    (own, metrics), (expected, whole) = found
    assert own.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-12, rtol=1e-9)
    assert metrics == pytest.approx(whole, abs=1e-12)


def test_groups_with_equal_rewards_come_last_and_have_no_backward_pass() -> None:
    groups = (group(0, (1.0, 1.0)), group(1, (0.0, 1.0)), group(2, (None, 0.5)))
    assert is_trained("dr_grpo", groups) == [True] * 2 + [False] * 4
    assert is_trained("dr_grpo", groups, skips_idle_groups=False) == [True] * 6


def test_a_pull_without_an_advantage_trains_every_group() -> None:
    for variant, changes in (
        ("grpo", {}),
        ("dr_grpo", {"entropy_coef": 0.01}),
        ("ppo", {}),
    ):
        assert all(is_trained(variant, GROUPS, **changes)), variant
    in_reward = {"kl_coef": 0.1, "kl_in": "reward"}
    assert all(is_trained("rloo, kl in the reward", GROUPS, **in_reward)), (
        "no two rewards are equal"
    )


def test_masked_samples_are_idle_whatever_pulls() -> None:
    cut = [sample.model_copy(update={"truncated": True}) for sample in GROUPS[0].samples]
    groups = (replace(GROUPS[0], samples=tuple(cut)), *GROUPS[1:])
    seen = is_trained("grpo", groups, mask_truncated=True)
    assert seen.count(False) == 4


def test_actions_that_an_objective_selects_are_trained() -> None:
    """KL-Cov's penalty does not depend on the advantage."""
    policy, (objective, hyperparameters) = policy64(), chosen("kl_cov")
    batch = prepare(policy, EQUAL, objective, hyperparameters)
    selected = batch.values_E["selected"] > 0
    samples = torch.tensor(
        [e.sample for rows in batch.minibatches for e in rows for _ in range(e.num_actions)]
    )
    assert not batch.idle & set(samples[selected].tolist())


async def test_momentum_and_decay_act_in_a_step_without_gradients(engine: Engine) -> None:
    asked = job(weight_decay=0.1)
    await engine.learner.initialize(asked)
    first = await engine.learner.step(asked, play(1), export_state=True)
    equal = tuple(replace(g, rewards=(1.0,) * len(g.rewards)) for g in play(2).groups)
    second = await engine.learner.step(asked, StepBatch(2, groups=equal), export_state=True)
    assert (len(first.plan), len(second.plan)) == (1, 2), "one group is trained, the others are not"
    assert second.metrics["train/grad_norm"] == second.metrics["train/skipped"] == 0.0
    assert second.state.weights_sha256 != first.state.weights_sha256


def test_runs_keep_the_rules_that_they_began_with() -> None:
    config = job().config
    for rules, is_new in ((5, False), (6, True), (RULES, True)):
        made = hyperparameters_of(config, micro_batch_tokens=7, rules=rules)
        assert (made.skips_idle_groups, made.drops_unread) == (is_new, is_new)
