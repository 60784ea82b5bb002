"""Which actions Clip-Cov and KL-Cov choose: by hand, as a share of the step, and always the same."""

import math
from typing import Any

import pytest
import torch

from tests.unit.trainer.batches import MIXED, policy64
from tests.unit.trainer.support import job
from trainer.algorithms import clip_cov, kl_cov
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.grpo import prepare_batch
from trainer.objective.covariance import MeasuredActions, covariances
from trainer.objective.hyperparameters import Hyperparameters


def measured(
    advantages: list[float], logprobs: list[float], *, counts: list[bool] | None = None
) -> MeasuredActions:
    logprob = torch.tensor(logprobs, dtype=torch.float64)
    return MeasuredActions(
        logprob_E=logprob,
        log_ratio_E=torch.zeros_like(logprob),
        advantage_E=torch.tensor(advantages, dtype=torch.float64),
        counts_E=torch.tensor(counts or [True] * len(logprobs)),
    )


MANY = measured([1.0, -1.0] * 500, [-1.0 - n % 7 for n in range(1000)])


def test_a_likely_action_with_a_high_advantage_has_a_positive_covariance() -> None:
    """The means are 0 and -2. The last action does not count."""
    four = measured([1, -1, 1, -1, 9], [-1, -3, -4, 0, -9], counts=[True] * 4 + [False])
    assert covariances(four).tolist() == [1, 1, -2, -2, -math.inf]


def test_clip_cov_draws_its_share_from_the_band() -> None:
    band = Hyperparameters(cov_ratio=0.1, cov_low=0.5, cov_high=2.5)
    chosen = clip_cov.select(MANY, band)
    assert int(chosen.sum()) == 100
    cov = covariances(MANY)[chosen]
    assert float(cov.min()) > 0.5
    assert float(cov.max()) < 2.5
    assert 0 < int(chosen[:500].sum()) < 100, "they are drawn, not the first ones"


def test_clip_cov_leaves_out_what_the_ratio_clips_already() -> None:
    clipped = MeasuredActions(
        MANY.logprob_E, torch.full((1000,), 9.0).double(), MANY.advantage_E, MANY.counts_E
    )
    chosen = clip_cov.select(clipped, Hyperparameters(cov_ratio=0.9, cov_low=0, cov_high=9))
    assert chosen.any()
    assert (MANY.advantage_E[chosen] < 0).all(), "a large ratio is clipped where A > 0"


def test_the_draw_follows_from_seed_step_and_place() -> None:
    first = clip_cov.draws(9, seed=1, step=2)
    assert torch.equal(first, clip_cov.draws(9, seed=1, step=2))
    assert torch.equal(first[:5], clip_cov.draws(5, seed=1, step=2))
    others = [clip_cov.draws(9, seed=s, step=t) for s, t in ((1, 3), (2, 2), (12, 0))]
    assert all(not torch.equal(first, other) for other in others)
    assert first.tolist()[:2] == [PLACE_0, PLACE_1], "another draw would change finished runs"


PLACE_0, PLACE_1 = 5667141273276446349, 9199171980298344309


def test_kl_cov_chooses_the_largest() -> None:
    chosen = kl_cov.select(MANY, Hyperparameters(cov_ratio=0.05))
    cov = covariances(MANY)
    assert int(chosen.sum()) == 50
    assert float(cov[chosen].min()) >= float(cov[~chosen].max())


@pytest.mark.parametrize("select", [clip_cov.select, kl_cov.select])
def test_actions_that_do_not_count_are_not_chosen(select: Any) -> None:
    everything = Hyperparameters(cov_ratio=1.0, cov_low=0.0, cov_high=99.0)
    silent = [n % 5 > 0 for n in range(1000)]
    some = MeasuredActions(MANY.logprob_E, MANY.log_ratio_E, MANY.advantage_E, torch.tensor(silent))
    chosen = select(some, everything)
    assert chosen.any()
    assert not (chosen & ~some.counts_E).any()
    none = MeasuredActions(
        MANY.logprob_E, MANY.log_ratio_E, MANY.advantage_E, some.counts_E & False
    )
    assert not select(none, everything).any()


@pytest.mark.parametrize("select", [clip_cov.select, kl_cov.select])
def test_a_step_whose_advantages_are_all_0_chooses_nothing(select: Any) -> None:
    alike = measured([0.0] * 4, [-1.0, -2.0, -3.0, -4.0])
    assert not select(alike, Hyperparameters(cov_ratio=1.0, cov_low=0.0)).any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_step_chooses_by_the_policy_before_its_updates(name: Any) -> None:
    """A sample without a reward, and one that is masked, are never chosen."""
    band: dict[str, Any] = {"cov_low": 0.0} if name == "clip_cov" else {}
    config = job(algorithm=name, cov_ratio=1.0, seed=3, **band)
    chosen = hyperparameters_of(config.config, micro_batch_tokens=4096, step=7)
    assert (chosen.seed, chosen.step) == (3, 7)
    batch = prepare_batch(policy64(), MIXED, objective=OBJECTIVES[name], hyperparameters=chosen)
    selected, sample = (
        batch.values_E["selected"],
        [e.sample for rows in batch.minibatches for e in rows for _ in range(e.num_actions)],
    )
    assert 0 < int(selected.sum()) < len(selected)
    assert all(n != 3 for n, one in zip(sample, selected.tolist(), strict=True) if one)
    assert (
        "selected"
        not in prepare_batch(
            policy64(), MIXED, objective=OBJECTIVES["grpo"], hyperparameters=chosen
        ).values_E
    )
