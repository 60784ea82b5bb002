"""GRPO's numbers, in float64: advantages, the clipped loss, weights, gradients."""

import math
from dataclasses import replace

import pytest
import torch

from schemas.config import LossAggregation
from schemas.sampling import Sequence as Row
from tests.unit.trainer.batches import GROUPS, accumulate_grpo, group, policy64
from trainer import grpo
from trainer.algorithms import gspo
from trainer.forward.ops import Forward
from trainer.forward.packing import Example, pack
from trainer.objective.aggregate import token_weights
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import k3
from trainer.objective.metrics import Means
from trainer.objective.objective import Actions, Objective
from trainer.objective.sequences import Rows
from trainer.policy import Policy

HYPERPARAMETERS = Hyperparameters(kl_coef=0.1, max_response_length=8)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradients(
    policy: Policy, hyperparameters: Hyperparameters
) -> tuple[dict[str, torch.Tensor], float]:
    for tensor in policy.tensors.values():
        tensor.grad = None
    metrics, _ = accumulate_grpo(policy, GROUPS, hyperparameters)
    return {n: _gradient(t).clone() for n, t in policy.tensors.items()}, metrics["train/loss"]


def test_advantages_are_whitened_with_the_sample_deviation() -> None:
    rewards = (1.0, 0.0, 0.0, 0.0)
    std = math.sqrt(sum((r - 0.25) ** 2 for r in rewards) / 3)
    expected = [(r - 0.25) / (std + 1e-6) for r in rewards]
    assert grpo.advantages(rewards) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rewards", [(0.7,), (0.1, 0.1, 0.1), (None, 1.0), (float("nan"), 1.0), ()])
def test_a_group_without_spread_has_advantage_exactly_zero(rewards: tuple[float, ...]) -> None:
    assert grpo.advantages(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_missing_reward_stays_out_of_the_baseline(missing: float | None) -> None:
    with_gap = grpo.advantages((1.0, missing, 0.0))
    without = grpo.advantages((1.0, 0.0))
    assert with_gap == [without[0], 0.0, without[1]]


def test_the_loss_is_pessimistic_on_both_sides() -> None:
    ratios = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss, clipped = grpo.clipped_loss(ratios.log(), advantages, low=0.2, high=0.3)
    assert loss.tolist() == pytest.approx([-0.5, -1.0, -1.3, 0.8, 1.5], abs=1e-12)
    assert clipped.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("objective", [grpo.OBJECTIVE, gspo.OBJECTIVE])
def test_the_second_bound_holds_where_the_advantage_is_negative(objective: Objective) -> None:
    log_ratio_M = torch.tensor([5.0, 2.0]).log()
    rows = Rows(torch.tensor([0, 1]), 2)
    actions = Actions(log_ratio_M, log_ratio_M, torch.tensor([-1.0, -1.0]), rows)
    for delta, expected in ((None, [5.0, 2.0]), (3.0, [3.0, 2.0])):
        loss_M, _ = objective.loss(actions, Hyperparameters(clip_delta=delta))
        assert loss_M.tolist() == pytest.approx(expected)


def test_a_huge_log_ratio_stays_finite() -> None:
    ratio = torch.tensor([1e4, -1e4], dtype=torch.float64)
    loss, _ = grpo.clipped_loss(ratio, -torch.ones(2, dtype=torch.float64), low=0.2, high=0.2)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(k3(ratio)).all()


def test_k3_is_never_negative_and_zero_at_zero() -> None:
    d = torch.linspace(-3, 3, 61, dtype=torch.float64)
    assert (k3(d) >= 0).all()
    assert float(k3(torch.zeros(1, dtype=torch.float64))) == 0.0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [1 / (2 * 1), 1 / (2 * 3)]),
        ("token_mean", [1 / 4, 1 / 4]),
        ("constant", [1 / (2 * 8), 1 / (2 * 8)]),
    ],
)
def test_weights_are_global_over_the_step(
    aggregation: LossAggregation, expected: list[float]
) -> None:
    rows = [
        Example(0, Row(tokens=(1, 2), loss_mask=(0, 1), logprobs=(0, 0))),
        Example(1, Row(tokens=(1, 2, 3), loss_mask=(0, 1, 1), logprobs=(0, 0, 0))),
        Example(1, Row(tokens=(1, 2), loss_mask=(0, 1), logprobs=(0, 0))),
        Example(2, Row(tokens=(1, 2), loss_mask=(0, 0), logprobs=(0, 0))),
    ]
    hyperparameters = replace(HYPERPARAMETERS, aggregation=aggregation)
    assert token_weights(rows, hyperparameters) == pytest.approx(dict(enumerate(expected)))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [0.0, 1 / (2 * 3)]),
        ("token_mean", [0.0, 1 / 3]),
        ("constant", [0.0, 1 / (2 * 8)]),
    ],
)
def test_a_masked_sample_has_no_weight(aggregation: LossAggregation, expected: list[float]) -> None:
    rows = [
        Example(0, Row(tokens=(1, 2), loss_mask=(0, 1), logprobs=(0, 0))),
        Example(1, Row(tokens=(1, 2, 3, 4), loss_mask=(0, 1, 1, 1), logprobs=(0, 0, 0, 0))),
    ]
    hyperparameters = replace(HYPERPARAMETERS, aggregation=aggregation)
    weights = token_weights(rows, hyperparameters, masked=(0,))
    assert weights == pytest.approx(dict(enumerate(expected)))
    assert token_weights(rows, hyperparameters, masked=(0, 1)) == {0: 0.0, 1: 0.0}


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_micro_batches_do_not_change_loss_or_gradient(aggregation: LossAggregation) -> None:
    policy = policy64()
    hyperparameters = replace(HYPERPARAMETERS, aggregation=aggregation)
    whole, loss = gradients(policy, hyperparameters)
    for tokens in (1, 16, 40):
        split, split_loss = gradients(policy, replace(hyperparameters, micro_batch_tokens=tokens))
        assert split_loss == pytest.approx(loss, abs=1e-9)
        for name, gradient in whole.items():
            torch.testing.assert_close(split[name], gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("native", [True, False])
def test_sharing_a_prompt_changes_neither_loss_nor_gradient(native: bool) -> None:
    policy = replace(policy64(), forward=Forward(allows_native=native))
    tree, loss = gradients(policy, HYPERPARAMETERS)
    plain = Policy(replace(policy.loaded, decoder=None), policy.tensors, policy.scaling)
    assert policy.shares_prompts
    assert not plain.shares_prompts
    rows, plain_loss = gradients(plain, HYPERPARAMETERS)
    assert plain_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in tree.items():
        torch.testing.assert_close(rows[name], gradient, atol=1e-6, rtol=1e-5)


def test_the_gradient_agrees_with_finite_differences() -> None:
    policy = policy64()
    hyperparameters = replace(HYPERPARAMETERS, clip_low=0.9, clip_high=9.0)
    exact, _ = gradients(policy, hyperparameters)
    for name in sorted(policy.tensors)[::9]:
        tensor = policy.tensors[name]
        at = int(exact[name].abs().argmax())
        flat = tensor.detach().view(-1)
        sides = []
        for sign in (1, -1):
            flat[at] += sign * 1e-6
            sides.append(gradients(policy, hyperparameters)[1])
            flat[at] -= sign * 1e-6
        slope = (sides[0] - sides[1]) / 2e-6
        assert slope == pytest.approx(float(exact[name].view(-1)[at]), rel=1e-5, abs=1e-9)


def test_without_spread_and_kl_nothing_is_learned() -> None:
    policy = policy64()
    even = (group(0, (1.0, 1.0)), group(1, (None, 0.3)))
    accumulate_grpo(policy, even, replace(HYPERPARAMETERS, kl_coef=0.0))
    assert all(float(_gradient(t).abs().max()) == 0.0 for t in policy.tensors.values())


def test_a_batch_without_actions_has_no_plan() -> None:
    metrics, plan = accumulate_grpo(policy64(), (group(0, (1.0,), empty=0),), HYPERPARAMETERS)
    assert plan == ()
    assert metrics == {}


def test_the_reference_is_the_base_without_what_was_trained() -> None:
    policy = policy64()
    examples = [Example(0, GROUPS[0].samples[0].sequences[0])]
    (micro,) = pack(examples, micro_batch_tokens=99, share=True)
    untrained = Policy(policy.loaded, {}, policy.scaling)
    expected, _ = untrained.logprobs(micro, temperature=1.0)
    reference, _ = policy.logprobs(micro, temperature=1.0, reference=True)
    current, _ = policy.logprobs(micro, temperature=1.0)
    assert torch.equal(expected, reference)
    assert not torch.allclose(expected, current)


def test_temperature_divides_the_logits() -> None:
    policy = policy64()
    (micro,) = pack(
        [Example(0, GROUPS[0].samples[0].sequences[0])], micro_batch_tokens=99, share=True
    )
    logits = policy.logits(micro) / 0.7
    expected = logits.log_softmax(-1).gather(-1, micro.target_M[:, None])[:, 0]
    torch.testing.assert_close(policy.logprobs(micro, temperature=0.7)[0], expected)


def test_the_ratio_is_taken_against_the_recorded_logprobs() -> None:
    policy, means = policy64(), Means()
    examples = [Example(0, GROUPS[0].samples[0].sequences[0])]
    (micro,) = pack(examples, micro_batch_tokens=99, share=True)
    hyperparameters = Hyperparameters(clip_low=0.99, clip_high=1e9)
    values = {
        "advantage": torch.full((2,), 2.0, dtype=torch.float64),
        "weight": torch.full((2,), 0.5, dtype=torch.float64),
    }
    loss = grpo.micro_batch_loss(policy, micro, values, grpo.OBJECTIVE, hyperparameters, means)
    logprobs, _ = policy.logprobs(micro, temperature=1.0)
    ratio = (logprobs - torch.tensor([-4.0, -4.1], dtype=torch.float64)).exp()
    expected = -(0.5 * 2.0 * ratio.detach()).sum()
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-12)
