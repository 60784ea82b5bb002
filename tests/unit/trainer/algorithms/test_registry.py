"""All objectives in float64: packing and micro-batches change nothing, gradients agree with finite
differences, and missing values are not learned from."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.algorithms import BOUNDED, CLIP_HIGH
from schemas.learner import RULES, GradedGroup
from tests.oracles.cases import Case, our_answer
from tests.unit.trainer.batches import MIXED, group, policy64
from tests.unit.trainer.support import job
from tests.unit.trainer.variants import VARIANTS
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.grpo import accumulate_gradients, prepare_batch
from trainer.objective.batch import PreparedBatch
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective
from trainer.policy import Policy

SLOW_POINTS = 5
"""Tensors whose slope is measured: every n-th."""


class Unshared(Policy):
    """The same forward pass, with each row run by itself."""

    @property
    def shares_prompts(self) -> bool:
        return False


def chosen(variant: str, **changes: Any) -> tuple[Objective, Hyperparameters]:
    config = job(**{**VARIANTS[variant], **changes}).config
    hyperparameters = hyperparameters_of(config, micro_batch_tokens=4096)
    return OBJECTIVES[config.advanced.algorithm], hyperparameters


def leaves(policy: Policy) -> dict[str, torch.Tensor]:
    critic = policy.critic.tensors if policy.critic else {}
    return {**policy.tensors, **critic}


def moved(policy: Policy) -> Policy:
    """The policy after a small change, as after an update, so that the ratio to pi_prox is not
    1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in leaves(policy).values():
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor += 0.02 * noise
    return policy


def prepare(
    policy: Policy,
    groups: Sequence[GradedGroup],
    objective: Objective,
    hyperparameters: Hyperparameters,
) -> PreparedBatch:
    return prepare_batch(policy, groups, objective=objective, hyperparameters=hyperparameters)


def gradients(
    policy: Policy, batch: PreparedBatch
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    for tensor in leaves(policy).values():
        tensor.grad = None
    metrics, _ = accumulate_gradients(policy, batch)
    return {n: t.grad.clone() for n, t in leaves(policy).items() if t.grad is not None}, metrics


def trained(
    policy: Policy, variant: str, groups: tuple[GradedGroup, ...] = MIXED, **changes: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and metrics of the second update, with the logprobs that were measured before the
    first."""
    objective, hyperparameters = chosen(variant)
    batch = prepare(policy, groups, objective, replace(hyperparameters, **changes))
    return gradients(moved(policy), batch)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packing_and_micro_batches_change_nothing(variant: str) -> None:
    whole, metrics = trained(policy64(), variant)
    assert whole
    assert any(float(gradient.abs().max()) > 0 for gradient in whole.values())
    plain = policy64()
    unshared = Unshared(plain.loaded, plain.tensors, plain.scaling, plain.critic)
    sizes = (1, 9, 20, 45)
    others = [trained(policy64(), variant, micro_batch_tokens=n) for n in sizes]
    for found, seen in (*others, trained(unshared, variant)):
        for key, value in metrics.items():
            assert seen[key] == pytest.approx(value, abs=1e-9), key
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=0)


STOPPED = ("cispo", "dppo", "dppo, kl")
"""Objectives whose gradient is not the derivative of their value, because part of it is a constant."""


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in STOPPED])
def test_the_gradient_is_the_slope(variant: str) -> None:
    policy = policy64()
    batch = prepare(policy, MIXED, *chosen(variant))
    exact, _ = gradients(moved(policy), batch)
    names = [*sorted(policy.tensors)[::SLOW_POINTS], *sorted(set(exact) - set(policy.tensors))]
    for name in names:
        at = int(exact[name].abs().argmax())
        flat = leaves(policy)[name].detach().view(-1)
        sides = []
        for sign in (1, -1):
            flat[at] += sign * 1e-6
            sides.append(gradients(policy, batch)[1]["train/loss"])
            flat[at] -= sign * 1e-6
        slope = (sides[0] - sides[1]) / 2e-6
        assert slope == pytest.approx(float(exact[name].view(-1)[at]), rel=1e-4, abs=1e-8), name


def test_the_gradient_of_cispo_is_that_of_weighted_log_probabilities() -> None:
    """Where every weight is at its bound the loss is - bound A log pi, whose gradient can be
    checked."""
    policy = policy64()
    objective, hyperparameters = chosen("cispo")
    batch = prepare(policy, MIXED, objective, replace(hyperparameters, clip_high=-0.999))
    exact, metrics = gradients(policy, batch)
    assert metrics["train/clip_ratio"] == 1.0
    name = sorted(policy.tensors)[0]
    at = int(exact[name].abs().argmax())
    flat, sides = policy.tensors[name].detach().view(-1), []
    for sign in (1, -1):
        flat[at] += sign * 1e-6
        sides.append(gradients(policy, batch)[1]["train/loss"])
        flat[at] -= sign * 1e-6
    slope = (sides[0] - sides[1]) / 2e-6
    assert slope == pytest.approx(float(exact[name].view(-1)[at]), rel=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_missing_reward_changes_nobody_else_s_gradient(variant: str) -> None:
    """A reward of None, NaN or infinity counts as missing."""
    found = []
    for missing in (None, float("nan"), float("-inf")):
        groups = (group(0, (1.0, missing, 0.0)), group(1, (0.0, 0.5)))
        found.append(trained(policy64(), variant, groups)[0])
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(other[name], gradient)
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_without_rewards_moves_nothing(variant: str) -> None:
    """Except where a KL term or an entropy bonus pulls at the policy."""
    groups = (group(0, (None, None)), group(1, (None, float("nan"))))
    found, metrics = trained(policy64(), variant, groups, kl_coef=0.0, entropy_coef=0.0)
    assert metrics["train/loss"] == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in found.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_without_actions_has_no_plan(variant: str) -> None:
    policy = policy64()
    batch = prepare(policy, (group(0, (1.0,), empty=0),), *chosen(variant))
    assert accumulate_gradients(policy, batch) == ({}, ())


def test_defaults_agree_with_what_submit_knows() -> None:
    for name, objective in OBJECTIVES.items():
        if name in BOUNDED:
            assert objective.defaults.clip_high == CLIP_HIGH.get(name, 0.2)


def test_a_run_s_own_values_come_last() -> None:
    hyperparameters = hyperparameters_of(
        job(
            algorithm="dapo", clip_high=0.4, kl_coef=0.0, loss_aggregation="constant", gamma=0.5
        ).config,
        micro_batch_tokens=7,
    )
    assert (hyperparameters.clip_low, hyperparameters.clip_high) == (0.2, 0.4)
    assert (hyperparameters.aggregation, hyperparameters.gamma) == ("constant", 0.5)
    assert (hyperparameters.micro_batch_tokens, hyperparameters.max_response_length) == (7, 8)
    silent = hyperparameters_of(job(algorithm="dapo").config, micro_batch_tokens=7)
    assert (silent.clip_high, silent.aggregation) == (0.28, "token_mean")


def test_the_kl_of_reinforce_plus_plus_is_in_the_reward_and_with_a_baseline_in_the_loss() -> None:
    def kl(rules: int = RULES, **advanced: Any) -> tuple[str, str]:
        config = job(algorithm="reinforce_plus_plus", kl_coef=0.1, **advanced).config
        hyperparameters = hyperparameters_of(config, micro_batch_tokens=7, rules=rules)
        return hyperparameters.kl_in, hyperparameters.kl_estimator

    assert kl() == ("reward", "k1")
    assert kl(group_baseline=True) == ("loss", "k2")
    assert kl(group_baseline=True, kl_in="reward", kl_estimator="k1") == ("reward", "k1")
    assert kl(rules=1, group_baseline=True) == ("reward", "k1"), "runs of before keep theirs"


def test_reinforce_plus_plus_with_a_baseline_equals_a_loss_computed_by_hand() -> None:
    """Rewards 1 and 0 for one prompt, 0.5 and 0.5 for the other, one action each; all written
    out."""
    now, ref = [-1.0, -1.2, -0.9, -1.1], [-1.1, -1.0, -1.0, -0.8]
    white = [0.5, -0.5, 0.0, 0.0]
    deviation = math.sqrt(sum(x * x for x in white) / 3 + 1e-8)
    surrogate = -sum(x / deviation for x in white) / 4
    k2 = sum((n - r) ** 2 / 2 for n, r in zip(now, ref, strict=True)) / 4
    column = [torch.tensor(x, dtype=torch.float64)[:, None] for x in (now, ref)]
    ones = torch.ones(4, 1, dtype=torch.float64)
    case = Case(2, (1.0, 0.0, 0.5, 0.5), ones, column[0], column[0], column[0], column[1])
    config = job(algorithm="reinforce_plus_plus", group_baseline=True, kl_coef=0.1).config
    hyperparameters = hyperparameters_of(config, micro_batch_tokens=4096)
    found = our_answer(case, OBJECTIVES["reinforce_plus_plus"], hyperparameters)
    assert found.loss == pytest.approx(surrogate + 0.1 * k2, abs=1e-12)
    for row, (n, r, x) in enumerate(zip(now, ref, white, strict=True)):
        slope = (-x / deviation + 0.1 * (n - r)) / 4
        assert float(found.gradient[row, 0]) == pytest.approx(slope, abs=1e-12)
