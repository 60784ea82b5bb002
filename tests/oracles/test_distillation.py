"""The divergence of distillation against TRL and Liger: value and gradient, in any chunks."""

import pytest
import torch
from hypothesis import given

from schemas.config import LossAggregation
from tests.kit.property_examples import examples
from tests.oracles.cases import Case, cases, same
from tests.oracles.comparisons import AGGREGATIONS
from tests.oracles.teachers import (
    PEERS,
    TeacherCase,
    on_a_server,
    teacher_cases,
    teacher_gap,
)
from trainer.distillation.divergence import compare
from trainer.forward.predictions import Predictions


@pytest.mark.parametrize("peer", PEERS)
@examples(30)
@given(case=teacher_cases())
def test_value_and_gradient_equal_those_of_other_trainers(peer: str, case: TeacherCase) -> None:
    assert teacher_gap(case, peer) < 1e-9


@examples(10)
@given(case=teacher_cases())
def test_the_gradient_is_the_slope(case: TeacherCase) -> None:
    def value(states: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(len(states), dtype=torch.long)
        found = compare(
            Predictions(states, case.head),
            case.teacher,
            target,
            beta=case.beta,
            temperature=case.temperature,
            chunk_elements=case.chunk_elements,
        )
        return found.divergence_M.sum()

    states = case.states.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (states,), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@examples(30)
@given(case=cases())
def test_recorded_logprobs_teach_as_a_policy_gradient_of_other_trainers(
    aggregation: LossAggregation, case: Case
) -> None:
    mine, theirs = on_a_server(aggregation)(case)
    assert len(theirs) == 2
    for found in theirs.values():
        same(mine, found)
