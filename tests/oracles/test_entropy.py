"""The entropy bonus against TRL and verl, and the rule that moves its weight against TRL's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import LossAggregation
from tests.kit.property_examples import examples
from tests.oracles import theirs_trl, theirs_verl
from tests.oracles.cases import Answer, Case, TablePolicy, cases, graded_groups, same
from tests.oracles.comparisons import (
    AGGREGATIONS,
    LONGEST,
    advantage_of,
    clips,
    epsilons,
    hyperparameters_for,
)
from tests.unit.trainer.support import job
from trainer import grpo
from trainer.objective.entropy import EntropyControl

COEF = 0.3


def ours(case: Case, **changes: Any) -> Answer:
    """Our loss with an entropy bonus. Its `value_gradient` is the one with respect to the entropies."""
    objective, chosen = hyperparameters_for("grpo", entropy_coef=COEF, **changes)
    policy: Any = TablePolicy(case)
    chosen = replace(chosen, micro_batch_tokens=case.micro_batch_tokens)
    batch = grpo.prepare_batch(
        policy, graded_groups(case), objective=objective, hyperparameters=chosen
    )
    policy.before = False
    metrics, _ = grpo.accumulate_gradients(policy, batch)
    return Answer(metrics["train/loss"], policy.leaf.grad, policy.entropy_leaf.grad)


def entropies_of(case: Case) -> torch.Tensor:
    """Some positive numbers."""
    return case.now.abs() + case.reference.square()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@examples(30)
@given(case=cases())
def test_the_bonus_is_aggregated_as_verl_aggregates_it(
    aggregation: LossAggregation, case: Case
) -> None:
    objective, chosen = hyperparameters_for("grpo", aggregation=aggregation)
    entropies = entropies_of(case)
    policy = theirs_verl.policy_loss(
        case,
        "vanilla",
        advantage_of(case, objective),
        aggregation=aggregation,
        longest=LONGEST,
        **clips(chosen),
    )
    bonus = theirs_verl.entropy_bonus(case, entropies, aggregation=aggregation, longest=LONGEST)
    assert bonus.value_gradient is not None
    whole = Answer(policy.loss - COEF * bonus.loss, policy.gradient, -COEF * bonus.value_gradient)
    same(ours(replace(case, entropy=entropies), aggregation=aggregation), whole)


@examples(30)
@given(case=cases())
def test_the_bonus_of_a_mean_over_tokens_is_trl_s(case: Case) -> None:
    objective, chosen = hyperparameters_for("grpo", aggregation="token_mean")
    entropies = entropies_of(case)
    options: dict[str, Any] = {"loss_type": "dapo", "entropy_coef": COEF, **epsilons(chosen)}
    theirs = theirs_trl.loss_with_entropy(case, advantage_of(case, objective), entropies, **options)
    same(ours(replace(case, entropy=entropies), aggregation="token_mean"), theirs)


@examples(50)
@given(
    seen=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8),
    coef=st.sampled_from([0.0, 0.03, 0.1]),
    delta=st.sampled_from([0.01, 0.07]),
)
def test_the_weight_moves_as_trl_moves_it(seen: list[float], coef: float, delta: float) -> None:
    one = torch.ones(2, 2, dtype=torch.float64)
    case = Case(2, (0.0, 1.0), one, -one, -one, -one, -one)
    theirs = theirs_trl.entropy_weights(case, seen, coef=coef, target=0.8, delta=delta, most=0.15)
    advanced = job(
        entropy_coef=coef, entropy_target=0.8, entropy_coef_delta=delta, entropy_coef_max=0.15
    ).config.advanced
    control = EntropyControl.fresh(advanced)
    assert control is not None
    for entropy, (applied, after) in zip(seen, theirs, strict=True):
        assert control.next_coef(advanced) == pytest.approx(applied, abs=1e-12)
        control = control.after({"train/entropy_loss": entropy}, advanced)
        assert control.coef == after
