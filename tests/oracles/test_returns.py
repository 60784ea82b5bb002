"""REINFORCE++, GAE, the value loss and the KL penalties, against verl and against their definitions.

Of the three oracles only verl has these; the second witness is the definition, written as sums.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.config import KlEstimator
from tests.oracles import theirs_verl
from tests.oracles.cases import Case, cases
from trainer.algorithms import ppo, reinforce_plus_plus
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import divergence
from trainer.objective.objective import BatchBeforeUpdate, finite_or_none
from trainer.objective.value_loss import value_loss

factors = st.sampled_from([1.0, 0.95, 0.5])


def before(case: Case, penalty: torch.Tensor | None = None) -> BatchBeforeUpdate:
    """The case as an advantage estimator sees it: its actions alone, flattened."""
    live = case.mask > 0
    rows = torch.arange(case.num_rows)[:, None].expand_as(case.mask)
    return BatchBeforeUpdate(
        group_S=case.group,
        reward_S=[finite_or_none(reward) for reward in case.rewards],
        sample_E=rows[live],
        penalty_E=None if penalty is None else penalty[live],
        value_E=None if case.value is None else case.value[live],
    )


def several(case: Case) -> None:
    """verl's whitening needs two actions."""
    assume(theirs_verl.known_mask(case).sum() >= 2)


@given(case=cases(smallest=1), gamma=factors, penalised=st.booleans())
def test_reinforce_plus_plus_equals_verl(case: Case, gamma: float, penalised: bool) -> None:
    several(case)
    penalty = 0.3 * (case.proximal - case.reference) if penalised else None
    found = reinforce_plus_plus.estimate(before(case, penalty), Hyperparameters(gamma=gamma))
    with theirs_verl.exact_means():
        theirs = theirs_verl.returns(case, theirs_verl.token_rewards(case, penalty), gamma=gamma)
    torch.testing.assert_close(found.advantage_E, theirs[case.mask > 0], atol=1e-9, rtol=1e-12)


def test_reinforce_plus_plus_equals_returns_computed_by_hand() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    case = Case(1, (1.0, -1.0), mask, mask, mask, mask, mask)
    found = reinforce_plus_plus.estimate(before(case), Hyperparameters(gamma=0.5)).advantage_E
    returns = torch.tensor([0.5, 1.0, -1.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    torch.testing.assert_close(found, expected)


@given(case=cases())
def test_reinforce_plus_plus_with_a_group_baseline_equals_verl(case: Case) -> None:
    several(case)
    known = [g for g, is_known in zip(case.group, case.has_reward, strict=True) if is_known]
    assume(all(known.count(g) > 1 for g in known))
    found = reinforce_plus_plus.estimate(before(case), Hyperparameters(group_baseline=True))
    with theirs_verl.exact_means():
        theirs = theirs_verl.baseline(case)
    torch.testing.assert_close(found.advantage_E, theirs[case.mask > 0], atol=1e-9, rtol=1e-12)


def test_a_reward_alone_is_its_own_baseline_and_verl_s_has_none() -> None:
    mask = torch.ones(3, 1, dtype=torch.float64)
    case = Case(3, (0.9, None, None), mask, mask, mask, mask, mask)
    both = replace(case, rewards=(0.9, None, None, 1.0, 0.0, 0.5), mask=torch.ones(6, 1).double())
    found = reinforce_plus_plus.estimate(before(both), Hyperparameters(group_baseline=True))
    assert float(found.advantage_E[0]) == 0.0
    assert float(theirs_verl.baseline(both)[0, 0]) > 0.5


@given(case=cases(smallest=1), gamma=factors, lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_verl(case: Case, gamma: float, lam: float) -> None:
    several(case)
    assert case.value is not None
    live = case.mask > 0
    known = theirs_verl.known_mask(case)[live] > 0
    hyperparameters = Hyperparameters(gamma=gamma, gae_lambda=lam)
    found = ppo.estimate(before(case), hyperparameters)
    with theirs_verl.exact_means():
        rewards = theirs_verl.token_rewards(case)
        advantages, returns = theirs_verl.gae(case, rewards, case.value, gamma=gamma, lam=lam)
    assert found.return_E is not None
    torch.testing.assert_close(found.return_E[known], returns[live][known], atol=1e-9, rtol=1e-12)
    whitened = advantages[live].masked_fill(~known, 0.0)
    torch.testing.assert_close(found.advantage_E, whitened, atol=1e-9, rtol=1e-12)


@given(case=cases(smallest=1, gaps=False), gamma=factors, lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_its_definition(case: Case, gamma: float, lam: float) -> None:
    seen = before(case)
    assert seen.value_E is not None
    rewards = theirs_verl.token_rewards(case)[case.mask > 0]
    found, returns = ppo.gae(rewards, seen.value_E, seen.sample_E, gamma=gamma, gae_lambda=lam)
    for sample in set(seen.sample_E.tolist()):
        at = (seen.sample_E == sample).nonzero()[:, 0].tolist()
        values = [*(float(seen.value_E[i]) for i in at), 0.0]
        deltas = [float(rewards[i]) + gamma * values[t + 1] - values[t] for t, i in enumerate(at)]
        for t, i in enumerate(at):
            sums = sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:]))
            assert float(found[i]) == pytest.approx(sums, abs=1e-9)
            assert float(returns[i]) == pytest.approx(sums + values[t], abs=1e-9)


@given(case=cases())
def test_the_value_loss_equals_verl(case: Case) -> None:
    assert case.value is not None
    before, returns = case.value / 2, case.now
    assume(bool((((case.value - before).abs() - 0.2).abs() > 1e-9).all()))
    leaves = [case.value.clone().requires_grad_() for _ in range(2)]
    loss, _ = value_loss(leaves[0], before, returns, clip=0.2)
    mine = (loss * case.mask).sum() / case.mask.sum()
    theirs = theirs_verl.value_loss(leaves[1], before, returns, case.mask, 0.2)
    mine.backward()
    theirs.backward()
    assert float(mine.detach()) == pytest.approx(float(theirs.detach()), abs=1e-9)
    assert leaves[0].grad is not None
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, atol=1e-9, rtol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(case=cases())
def test_kl_estimators_equal_verl(estimator: KlEstimator, case: Case) -> None:
    leaves = [case.now.clone().requires_grad_() for _ in range(2)]
    mine = divergence(estimator, case.reference - leaves[0])
    theirs = theirs_verl.CORE.kl_penalty(leaves[1], case.reference, estimator)
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    mine.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, atol=1e-12, rtol=1e-12)


def test_verl_cuts_k3_off_at_ten_and_we_do_not() -> None:
    d = torch.tensor([4.0], dtype=torch.float64)
    assert float(theirs_verl.CORE.kl_penalty(-d, torch.zeros_like(d), "k3")) == 10.0
    assert float(divergence("k3", d)) == pytest.approx(float(d.exp()) - 5.0)
