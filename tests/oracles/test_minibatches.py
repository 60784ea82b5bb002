"""The loss and gradient of each mini-batch against verl (`ppo_mini_batch_size`) and TRL
(`steps_per_generation`), which get the rows of this mini-batch and the advantages of the step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import LossAggregation
from tests.kit.property_examples import examples
from tests.oracles import theirs_trl, theirs_verl
from tests.oracles.cases import Answer, Case, TablePolicy, cases, graded_groups, same, times
from tests.oracles.comparisons import (
    AGGREGATIONS,
    LONGEST,
    advantage_of,
    clips,
    epsilons,
    hyperparameters_for,
)
from trainer import grpo


def rows_of(case: Case, rows: list[int]) -> Case:
    """The case with these rows alone."""
    tables = {
        name: getattr(case, name)[rows]
        for name in ("mask", "now", "behaviour", "proximal", "reference")
    }
    return replace(case, rewards=tuple(case.rewards[row] for row in rows), value=None, **tables)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@examples(30)
@given(case=cases(), most=st.integers(1, 2))
def test_each_mini_batch_equals_that_of_other_trainers(
    aggregation: LossAggregation, case: Case, most: int
) -> None:
    objective, chosen = hyperparameters_for("grpo", aggregation=aggregation, minibatch_groups=most)
    chosen = replace(chosen, micro_batch_tokens=case.micro_batch_tokens)
    policy: Any = TablePolicy(case)
    batch = grpo.prepare_batch(
        policy, graded_groups(case), objective=objective, hyperparameters=chosen
    )
    policy.before, advantage, seen = False, advantage_of(case, objective), list[int]()
    for part in batch.split():
        policy.leaf.grad = None
        metrics, _ = grpo.accumulate_gradients(policy, part)
        groups = sorted({row.sample // case.size for rows in part.minibatches for row in rows})
        rows = [row for row in range(case.num_rows) if row // case.size in groups]
        seen += rows
        mine = Answer(metrics["train/loss"], policy.leaf.grad[rows])
        others = [row for row in range(case.num_rows) if row not in rows]
        assert not policy.leaf.grad[others].any()
        one, factor = rows_of(case, rows), AGGREGATIONS[aggregation].factor
        theirs = theirs_verl.policy_loss(
            one,
            "vanilla",
            advantage[rows],
            aggregation=aggregation,
            longest=LONGEST,
            **clips(chosen),
        )
        same(mine, theirs)
        options: dict[str, Any] = {
            "loss_type": AGGREGATIONS[aggregation].loss_type,
            "max_completion_length": LONGEST,
            **epsilons(chosen),
        }
        same(mine, times(theirs_trl.loss(one, advantage[rows], **options), factor(one)))
    trained = [row for row in seen if case.mask[row].any()]
    assert trained == torch.nonzero(case.mask.sum(-1))[:, 0].tolist(), "each row once, in order"
