"""Losses and their gradients against TRL, Liger and verl, in float64, and the cases where these
disagree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.property_examples import examples
from tests.oracles import theirs_liger, theirs_trl, theirs_verl
from tests.oracles.cases import Case, cases, our_answer, same, times
from tests.oracles.comparisons import (
    COMPARISONS,
    advantage_of,
    advantage_of_live_rows,
    decoupled,
    epsilons,
    hyperparameters_for,
)
from trainer import grpo
from trainer.algorithms import cispo, rloo

ONE = torch.ones(4, 2, dtype=torch.float64)
PLAIN = Case(2, (0.0, 1.0, 0.3, 0.1), ONE, -ONE, -1.1 * ONE, -1.05 * ONE, -ONE, 0.1 * ONE)


@pytest.mark.parametrize("name", COMPARISONS)
@examples(20)
@given(case=cases())
def test_value_and_gradient_equal_those_of_other_implementations(name: str, case: Case) -> None:
    mine, theirs = COMPARISONS[name](case)
    for found in theirs.values():
        same(mine, found)


@given(st.just(PLAIN))
def test_everything_is_compared_with_two_oracles_that_have_it(case: Case) -> None:
    """REINFORCE++ and PPO are in verl alone; `test_returns.py` is the second check for them. DPPO,
    GPG, Clip-Cov and KL-Cov are in verl alone too, and GMPO is in TRL with the same means. A test by
    hand is their second check."""
    for name, compare in COMPARISONS.items():
        alone = name.startswith(
            ("reinforce_plus_plus", "ppo", "dppo", "gpg", "gmpo", "clip", "kl_")
        )
        assert len(compare(case)[1]) >= (1 if alone else 2), name


@given(st.just(PLAIN))
def test_against_the_sampler_the_weight_would_count_twice(case: Case) -> None:
    """Twin: with the ratio to mu, multiplied by the weight again, the loss is not the decoupled
    one."""
    mine, theirs = decoupled("decoupled", "token")(case)
    weights = (case.now - case.behaviour).exp()
    twice = theirs_verl.policy_loss(
        case, "vanilla", advantage_of(case, rloo.OBJECTIVE), weights=weights
    )
    same(mine, theirs["TRL"])
    assert (mine.gradient - twice.gradient).abs().max() > 0.01


@examples(25)
@given(case=cases())
def test_grpo_from_the_reward_on_is_trl_s_but_for_its_eps(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "EPS", 1e-4)
        mine = our_answer(case, grpo.OBJECTIVE, grpo.OBJECTIVE.defaults)
    same(mine, times(theirs_trl.loss(case), case.row_factor))


@examples(25)
@given(case=cases())
def test_importance_sampling_has_the_gradient_of_weighted_log_probabilities(case: Case) -> None:
    """verl's form is a constant weight times log pi. Its value differs; its gradient is the
    same."""
    objective, chosen = hyperparameters_for("importance_sampling")
    ratio = (case.now - case.behaviour).exp()
    advantage = advantage_of(case, objective)
    theirs = theirs_verl.reinforce_loss(case, advantage, ratio)
    expected = theirs.gradient / chosen.max_response_length
    mine = our_answer(case, objective, chosen)
    torch.testing.assert_close(mine.gradient, expected, atol=1e-9, rtol=1e-12)


@examples(25)
@given(case=cases())
def test_gmpo_is_verl_s_but_for_the_1e_8_in_its_means(case: Case) -> None:
    objective, chosen = hyperparameters_for("gmpo")
    advantage = advantage_of_live_rows(case, objective)
    theirs = theirs_verl.policy_loss(
        case, "geo_mean", advantage, clip_ratio_low=0.4, clip_ratio_high=0.4
    )
    near = float(advantage.abs().max()) * 1e-6
    mine = our_answer(case, objective, chosen)
    same(mine, times(theirs, case.row_factor), atol=1e-12 + near)


def test_cispo_is_not_bounded_from_below_where_verl_is() -> None:
    one = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.0, 1.0), one, -3 * one, -one, -one, -one)
    advantage = advantage_of(case, cispo.OBJECTIVE)
    mine = our_answer(case, cispo.OBJECTIVE, cispo.OBJECTIVE.defaults)
    both: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 4.0}
    theirs = theirs_verl.policy_loss(case, "cispo", advantage, **both)
    assert (mine.gradient - theirs.gradient).abs().max() > 0.1


def test_rows_without_actions_do_not_count_where_trl_and_liger_count_them() -> None:
    one = torch.ones(4, 1, dtype=torch.float64)
    mask = torch.tensor([[1.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    case = Case(4, (0.0, 1.0, 0.0, 1.0), mask, -one, -one, -one, -one)
    advantage = advantage_of(case, grpo.OBJECTIVE)
    mine = our_answer(case, grpo.OBJECTIVE, grpo.OBJECTIVE.defaults)
    same(mine, theirs_verl.policy_loss(case, "vanilla", advantage, aggregation="sequence_mean"))
    for theirs in (
        theirs_trl.loss(case, advantage),
        theirs_liger.loss(case, advantage, loss_type="grpo"),
    ):
        same(mine, times(theirs, 2.0))


@examples(25)
@given(case=cases(), data=st.data())
def test_cut_off_and_failed_samples_are_masked_as_trl_masks_them(
    case: Case, data: st.DataObject
) -> None:
    """TRL zeroes the mask of a truncated completion before its loss, and counts its row. Twin: without
    the key the same rows are trained. A failed sample is masked in the same way."""
    live = [row for row in range(case.num_rows) if case.mask[row].any()]
    cut = data.draw(st.sets(st.sampled_from(live), min_size=1, max_size=len(live)))
    shown = case.mask.clone()
    shown[sorted(cut)] = 0
    if not shown.any():
        return
    advantage = advantage_of(case, grpo.OBJECTIVE)
    theirs = replace(case, mask=shown)
    if data.draw(st.booleans()):
        masked = replace(case, cut=frozenset(cut))
        on = replace(grpo.OBJECTIVE.defaults, mask_truncated=True)
    else:
        masked = replace(case, failed=frozenset(cut))
        on = replace(grpo.OBJECTIVE.defaults, mask_failed=True)
    mine = our_answer(masked, grpo.OBJECTIVE, on)
    same(mine, times(theirs_trl.loss(theirs, advantage), case.row_factor))
    off = our_answer(masked, grpo.OBJECTIVE, grpo.OBJECTIVE.defaults)
    same(off, our_answer(case, grpo.OBJECTIVE, grpo.OBJECTIVE.defaults))


def test_gspo_is_a_mean_over_sequences_where_verl_s_other_modes_are_not() -> None:
    one = torch.ones(2, 3, dtype=torch.float64)
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    case = Case(2, (0.0, 1.0), mask, -one, -one, -one, -one)
    objective, chosen = hyperparameters_for("gspo")
    advantage, mine = advantage_of(case, objective), our_answer(case, *hyperparameters_for("gspo"))
    clips: dict[str, Any] = {"clip_ratio_low": chosen.clip_low, "clip_ratio_high": chosen.clip_high}
    same(
        mine, theirs_verl.policy_loss(case, "gspo", advantage, aggregation="sequence_mean", **clips)
    )
    tokens = theirs_verl.policy_loss(case, "gspo", advantage, aggregation="token_mean", **clips)
    assert (mine.gradient - tokens.gradient).abs().max() > 0.05


def test_with_one_update_the_ratio_to_the_proximal_policy_is_one() -> None:
    """The gradient is then that of w A log pi, which is plain importance sampling."""
    one = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.0, 1.0), one, -one, -1.7 * one, -9 * one, -one)
    settings = replace(rloo.OBJECTIVE.defaults, correction="decoupled", max_response_length=1)
    found = our_answer(case, rloo.OBJECTIVE, settings)
    expected = -0.5 * advantage_of(case, rloo.OBJECTIVE) * torch.tensor(0.7).double().exp()
    torch.testing.assert_close(found.gradient[:, 0], expected)


@examples(25)
@given(case=cases())
def test_the_loss_equals_ligers_fused_one_on_hidden_states(case: Case) -> None:
    """The same numbers as logits. Liger rounds them to fp32, whose last digit at a log-probability
    of about -5 is 5e-7."""
    generator = torch.Generator().manual_seed(case.num_rows)
    rows, width = case.mask.shape
    hidden = torch.randn(rows, width, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (rows, width), generator=generator)
    logprobs = (hidden @ head.t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    offset = torch.rand(rows, width, generator=generator, dtype=torch.float64) * 0.3 - 0.15
    near = replace(case, now=logprobs, behaviour=logprobs - offset)
    objective, chosen = hyperparameters_for("dapo")
    advantage = advantage_of(near, objective)
    mine = our_answer(near, objective, chosen)
    leaf = hidden.clone().requires_grad_()
    theirs = theirs_liger.fused_loss(
        leaf, head, targets, near.mask, advantage, near.behaviour, **epsilons(chosen)
    )
    theirs.backward()
    again = hidden.clone().requires_grad_()
    found = (again @ head.t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    found.backward(mine.gradient)
    scale = 1 + float(advantage.abs().max())
    assert abs(float(theirs.detach()) - mine.loss) <= 1e-6 * scale
    torch.testing.assert_close(leaf.grad, again.grad, atol=1e-6 * scale, rtol=1e-5)
