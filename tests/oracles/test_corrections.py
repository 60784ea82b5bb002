"""Decoupled PPO, truncated and masked importance sampling, against TRL, verl and Liger.

Both references weigh by pi_prox / mu while their ratio is taken against pi_prox, as ours does.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings

from schemas.config import Correction, CorrectionLevel
from tests.oracles import theirs_liger, theirs_trl, theirs_verl
from tests.oracles.cases import Answer, Case, cases, ours, same
from tests.oracles.test_losses import advantage_of
from trainer.losses import rloo
from trainer.settings import Settings

LOW, HIGH = 0.5, 2.0


def chosen(correction: Correction, level: CorrectionLevel) -> Settings:
    """pi_prox is surveyed where there are several updates."""
    return replace(
        rloo.OBJECTIVE.defaults,
        aggregation="token_mean",
        correction=correction,
        correction_level=level,
        correction_low=LOW,
        correction_high=HIGH,
        updates=2,
    )


def mine(case: Case, correction: Correction, level: CorrectionLevel) -> tuple[Answer, torch.Tensor]:
    advantage = advantage_of(case, rloo.OBJECTIVE)
    return ours(case, rloo.OBJECTIVE, chosen(correction, level)), advantage


def weighed(case: Case, advantage: torch.Tensor, weights: torch.Tensor) -> list[Answer]:
    """The decoupled loss with given weights, by verl and Liger."""
    wide = weights.expand_as(case.mask)
    liger = {"loss_type": "dapo", "against": case.proximal, "weights": wide}
    return [
        theirs_verl.policy_loss(case, "vanilla", advantage, against=case.proximal, weights=wide),
        theirs_liger.loss(case, advantage, **liger),
    ]


def total(case: Case) -> torch.Tensor:
    return ((case.proximal - case.behaviour) * case.mask).sum(-1, keepdim=True)


def off_the_edge(value: torch.Tensor) -> None:
    """Sums over a row have another order in each: keep away from where something is cut off."""
    assume(bool((value.abs() < 19).all()))
    for edge in (LOW, HIGH):
        assume(bool(((value.exp() - edge).abs() > 1e-9).all()))


@settings(max_examples=40)
@given(case=cases())
def test_decoupled(case: Case) -> None:
    found, advantage = mine(case, "decoupled", "token")
    unbounded = {"use_vllm": True, "vllm_importance_sampling_clip_max": 1e30}
    options = {"loss_type": "dapo", "against": case.proximal, **unbounded}
    same(found, theirs_trl.loss(case, advantage, **options))
    for theirs in weighed(case, advantage, (case.proximal - case.behaviour).exp()):
        same(found, theirs)


@pytest.mark.parametrize("correction", ["truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@settings(max_examples=40)
@given(case=cases())
def test_truncated_and_masked(correction: Correction, level: CorrectionLevel, case: Case) -> None:
    if level == "sequence":
        off_the_edge(total(case))
    found, advantage = mine(case, correction, level)
    mode = f"{level}_{'truncate' if correction == 'truncated' else 'mask'}"
    low = {} if correction == "truncated" else {"vllm_importance_sampling_clip_min": LOW}
    trl = theirs_trl.loss(
        case,
        advantage,
        loss_type="dapo",
        use_vllm=True,
        against=case.proximal,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=HIGH,
        **low,
    )
    same(found, trl)
    threshold = HIGH if correction == "truncated" else f"{LOW}_{HIGH}"
    weights = theirs_verl.correction_weights(case, level=level, threshold=threshold)
    for theirs in weighed(case, advantage, weights):
        same(found, theirs)


@settings(max_examples=40)
@given(case=cases())
def test_masked_by_the_geometric_mean(case: Case) -> None:
    """verl rejects such sequences and does not weigh the others; the weight is written out here."""
    mean = total(case) / case.mask.sum(-1, keepdim=True).clamp(min=1)
    off_the_edge(mean)
    found, advantage = mine(case, "masked", "geometric")
    with theirs_verl.exact_means():
        kept = theirs_verl.rejected(case, low=LOW, high=HIGH)
    for theirs in weighed(case, advantage, kept * mean.exp()):
        same(found, theirs)


@settings(max_examples=40)
@given(case=cases())
def test_truncated_geometric_means(case: Case) -> None:
    mean = total(case) / case.mask.sum(-1, keepdim=True).clamp(min=1)
    off_the_edge(mean)
    found, advantage = mine(case, "truncated", "geometric")
    for theirs in weighed(case, advantage, mean.exp().clamp(max=HIGH)):
        same(found, theirs)


def test_with_one_update_the_ratio_to_the_proximal_policy_is_one() -> None:
    """The gradient is then that of w A log pi, which is plain importance sampling."""
    one = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.0, 1.0), one, -one, -1.7 * one, -9 * one, -one)
    settings = replace(chosen("decoupled", "token"), updates=1)
    found = ours(case, rloo.OBJECTIVE, settings)
    expected = -0.5 * advantage_of(case, rloo.OBJECTIVE) * torch.tensor(0.7).double().exp()
    torch.testing.assert_close(found.gradient[:, 0], expected)


def test_against_the_sampler_the_weight_would_count_twice() -> None:
    """Twin: the default ratio, weighed on top, is not the decoupled loss."""
    one = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.0, 1.0), one, -one, -1.1 * one, -1.1 * one, -one)
    advantage = advantage_of(case, rloo.OBJECTIVE)
    weights = (case.now - case.behaviour).exp()
    twice = theirs_verl.policy_loss(case, "vanilla", advantage, weights=weights)
    ratio = replace(rloo.OBJECTIVE.defaults, aggregation="token_mean")
    assert (ours(case, rloo.OBJECTIVE, ratio).gradient - twice.gradient).abs().max() > 0.01
