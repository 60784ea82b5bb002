"""Advantages against TRL and verl, with rewards missing, infinite and all equal."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import theirs_trl, theirs_verl
from tests.oracles.cases import Case, cases
from tests.oracles.comparisons import advantage_of
from trainer import grpo
from trainer.algorithms import dr_grpo, gdpo, gpg, maxrl, rloo
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate, by_group, finite_or_none


def advantages(case: Case, of: Any) -> torch.Tensor:
    """Our advantages (B), computed through the same code as for every objective."""
    before = BatchBeforeUpdate(
        group_S=case.group,
        reward_S=[finite_or_none(reward) for reward in case.rewards],
        sample_E=torch.arange(case.num_rows),
    )
    return by_group(of)(before, Hyperparameters()).advantage_E


def alone(case: Case) -> torch.Tensor:
    """Rows whose group has no other row with a reward, on which the references disagree."""
    known = Counter(g for g, is_known in zip(case.group, case.has_reward, strict=True) if is_known)
    return torch.tensor([known[group] < 2 for group in case.group])


@given(cases())
def test_grpo_is_verl_s(case: Case) -> None:
    theirs = theirs_verl.group_advantages(case, "grpo")
    mine = advantages(case, grpo.advantages)
    expected = theirs.masked_fill(alone(case), 0.0)
    torch.testing.assert_close(mine, expected, atol=1e-9, rtol=0)


@given(cases())
def test_grpo_is_trl_s_but_for_its_eps(case: Case) -> None:
    _, theirs = theirs_trl.score_batch(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "EPS", 1e-4)
        mine = advantages(case, grpo.advantages)
    torch.testing.assert_close(mine, theirs["advantages"], atol=1e-9, rtol=0)


def test_the_eps_of_references_differ() -> None:
    """Twin: with our own eps the same comparison fails where the spread is small."""
    ones = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.0, 1e-3), ones, -ones, -ones, -ones, -ones)
    _, theirs = theirs_trl.score_batch(case)
    assert (advantages(case, grpo.advantages) - theirs["advantages"]).abs().max() > 0.05


@given(cases())
def test_dr_grpo_is_verl_s_and_trl_s(case: Case) -> None:
    mine = advantages(case, dr_grpo.advantages)
    verl = theirs_verl.group_advantages(case, "grpo", norm_adv_by_std_in_grpo=False)
    _, trl = theirs_trl.score_batch(case, scale_rewards="none")
    expected = verl.masked_fill(alone(case), 0.0)
    torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(mine, trl["advantages"], atol=1e-12, rtol=0)


@given(cases())
def test_rloo_is_verl_s_in_both_forms(case: Case) -> None:
    mine = advantages(case, rloo.advantages)
    loop = theirs_verl.group_advantages(case, "rloo").masked_fill(alone(case), 0.0)
    vectorised = theirs_verl.group_advantages(case, "rloo_vectorized")
    torch.testing.assert_close(mine, loop, atol=1e-12, rtol=0)
    torch.testing.assert_close(mine, vectorised, atol=1e-12, rtol=0)


@given(cases(gaps=False))
def test_gpg_is_verl_s_but_for_what_alpha_counts(case: Case) -> None:
    theirs = theirs_verl.group_advantages(case, "gpg")
    mine = advantage_of(case, gpg.OBJECTIVE)
    rewards = [reward or 0.0 for reward in case.rewards]
    groups = [rewards[n : n + case.size] for n in range(0, case.num_rows, case.size)]
    differing = sum(case.size for group in groups if min(group) < max(group))
    counted = max(1, sum(reward != 0 for reward in rewards))
    if differing:
        # verl's alpha has 32 bits.
        torch.testing.assert_close(mine, theirs * counted / differing, atol=1e-9, rtol=1e-6)


@given(cases())
def test_maxrl_is_dr_grpo_over_the_mean(case: Case) -> None:
    """Within the bound that only negative rewards reach."""
    mine, centred = advantages(case, maxrl.advantages), advantages(case, dr_grpo.advantages)
    for first in range(0, case.num_rows, case.size):
        rows = slice(first, first + case.size)
        known = [r for r in map(finite_or_none, case.rewards[rows]) if r is not None]
        mean = math.fsum(known) / len(known) if known else 0.0
        expected = centred[rows] / mean if mean > 0 else torch.zeros(case.size).double()
        most = max(0, len(known) - 1)
        if known and min(known) >= 0:
            assert (expected.abs() <= most + 1e-9).all()
        torch.testing.assert_close(mine[rows], expected.clamp(-most, most), atol=1e-9, rtol=1e-9)


def test_a_mean_that_is_hardly_positive_makes_no_huge_advantage() -> None:
    assert maxrl.advantages((1.0, -1.0 + 1e-9, 0.0)) == [2.0, -2.0, -1.0]
    assert maxrl.advantages((1.0, 0.0, 0.0)) == pytest.approx([2.0, -1.0, -1.0])


def test_a_reward_alone_is_where_references_disagree() -> None:
    ones = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.5, None), ones, -ones, -ones, -ones, -ones)
    assert theirs_verl.group_advantages(case, "rloo").tolist() == [0.5, 0.0]
    assert theirs_verl.group_advantages(case, "rloo_vectorized").tolist() == [0.0, 0.0]
    for of in (grpo.advantages, dr_grpo.advantages, rloo.advantages):
        assert advantages(case, of).tolist() == [0.0, 0.0]


WEIGHTS = {"right": 1.0, "short": -0.25, "polite": 3.0}


def decoupled(case: Case, parts: dict[str, list[float]]) -> torch.Tensor:
    """Our GDPO advantages (B) of a case whose rewards have these parts."""
    before = BatchBeforeUpdate(
        group_S=case.group,
        reward_S=[finite_or_none(reward) for reward in case.rewards],
        sample_E=torch.arange(case.num_rows),
        parts=parts,
    )
    weights = tuple((name, WEIGHTS[name]) for name in parts)
    return gdpo.estimate(before, Hyperparameters(part_weights=weights)).advantage_E


def drawn_parts(case: Case, data: st.DataObject) -> dict[str, list[float]]:
    eighths = st.integers(-16, 16).map(lambda n: n / 8)
    rows = st.lists(eighths, min_size=case.num_rows, max_size=case.num_rows)
    return {name: data.draw(rows) for name in WEIGHTS}


@given(cases(), st.data())
def test_gdpo_is_trl_s_but_for_its_eps(case: Case, data: st.DataObject) -> None:
    parts = drawn_parts(case, data)
    _, theirs = theirs_trl.score_batch(
        case,
        parts=list(parts.values()),
        weights=list(WEIGHTS.values()),
        multi_objective_aggregation="normalize_then_sum",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "EPS", 1e-4)
        mine = decoupled(case, parts)
    expected = theirs["advantages"].masked_fill(torch.tensor(case.has_reward).logical_not(), 0.0)
    torch.testing.assert_close(mine, expected, atol=1e-9, rtol=0)


@given(cases(gaps=False), st.data())
def test_gdpo_is_verl_s_where_answers_are_equally_long(case: Case, data: st.DataObject) -> None:
    """verl computes it in 32 bits. It whitens with 1e-8 under the root."""
    parts = drawn_parts(case, data)
    full = replace(case, mask=torch.ones_like(case.mask))
    mine = decoupled(case, parts)
    theirs = theirs_verl.decoupled_advantages(full, parts, list(WEIGHTS.values()))
    width, rows = case.mask.shape[1], case.num_rows
    # Its variance is that of tokens, with ddof 1 too.
    factor = math.sqrt(width * (rows - 1) / (width * rows - 1)) if mine.any() else 1.0
    torch.testing.assert_close(mine, theirs[:, 0].double() * factor, atol=1e-4, rtol=1e-4)


def test_gdpo_tells_combinations_apart_that_add_up_alike() -> None:
    """Twin: these parts add up to the same reward of 3, so they are all the same to GRPO."""
    ones = torch.ones(3, 1, dtype=torch.float64)
    case = Case(3, (3.0, 3.0, 3.0), ones, -ones, -ones, -ones, -ones)
    parts = {"right": [3.0, 0.0, 1.5], "polite": [0.0, 1.0, 0.5]}
    assert advantages(case, grpo.advantages).tolist() == [0, 0, 0]
    found = decoupled(case, parts)
    assert found.tolist() == pytest.approx([-1, 1, 0], abs=1e-5)
