"""The divergence of distillation against TRL and Liger: value and gradient, in any chunks."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.property_examples import examples
from tests.oracles.available import oracle
from trainer.distillation.divergence import compare
from trainer.forward.predictions import Predictions

TRL = oracle("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
LIGER = oracle("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True, eq=False)
class TeacherCase:
    """States (M, H) and heads (V, H) of student and teacher, float64."""

    states: torch.Tensor
    head: torch.Tensor
    teacher: Predictions
    beta: float
    temperature: float
    chunk_elements: int


@st.composite
def teacher_cases(draw: st.DrawFn) -> TeacherCase:
    """Distributions that are flat, ordinary or nearly certain, and near each other or far apart."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    actions, vocabulary, hidden = (draw(st.integers(1, most)) for most in (6, 9, 4))
    scale, far = draw(st.sampled_from((0.0, 0.3, 3.0))), draw(st.sampled_from((0.0, 0.1, 3.0)))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states, head = scale * drawn(actions, hidden), drawn(vocabulary, hidden)
    teacher = Predictions(states + far * drawn(actions, hidden), head + far * drawn(*head.shape))
    beta, temperature = draw(st.sampled_from(BETAS)), draw(st.sampled_from((0.5, 1.0, 1.7)))
    chunk_elements = draw(st.sampled_from((1, 8 * vocabulary, 1 << 20)))
    return TeacherCase(states, head, teacher, beta, temperature, chunk_elements)


def solved(case: TeacherCase, by: str) -> tuple[torch.Tensor, ...]:
    """The mean divergence, and its gradients with respect to the student's states and head."""
    states, head = (t.clone().requires_grad_() for t in (case.states, case.head))
    theirs, num_actions = case.teacher, len(states)
    assert theirs.head_V_H is not None
    ours_logits = states @ head.t()
    teacher_logits = theirs.states_M_H @ theirs.head_V_H.t()
    if by == "ours":
        target = torch.zeros(num_actions, dtype=torch.long)
        found = compare(
            Predictions(states, head),
            theirs,
            target,
            beta=case.beta,
            temperature=case.temperature,
            chunk_elements=case.chunk_elements,
        )
        loss = found.divergence_M.mean()
    elif by == "TRL":
        loss = TRL(ours_logits, teacher_logits, beta=case.beta, temperature=case.temperature)
    else:
        tables = (ours_logits / case.temperature, teacher_logits / case.temperature)
        loss = LIGER.distillation_loss_fn(*tables, beta=case.beta) / num_actions
    return loss.detach(), *torch.autograd.grad(loss, (states, head))


@pytest.mark.parametrize("peer", ["TRL", "Liger"])
@examples(60)
@given(case=teacher_cases())
def test_value_and_gradient_equal_those_of_other_trainers(peer: str, case: TeacherCase) -> None:
    for mine, theirs in zip(solved(case, "ours"), solved(case, peer), strict=True):
        assert float(((mine - theirs).abs() / (1 + theirs.abs())).max()) < 1e-9


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
