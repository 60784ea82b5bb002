"""Student and teacher as states and heads that our divergence and the oracles can read, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.oracles.available import oracle
from trainer.distillation.divergence import compare
from trainer.forward.predictions import Predictions

TRL = oracle("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
LIGER = oracle("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
DISTILLED_WITH = {
    "distill, reverse KL": (1.0,),
    "distill, forward KL": (0.0,),
    "distill, JSD": (0.1, 0.5, 0.9),
}
"""The rows of the table of agreement, and their values of beta."""
BETAS = tuple(beta for betas in DISTILLED_WITH.values() for beta in betas)


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
def teacher_cases(draw: st.DrawFn, *, betas: Sequence[float] = BETAS) -> TeacherCase:
    """Distributions that are flat, ordinary or nearly certain, and near each other or far apart."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    actions, vocabulary, hidden = (draw(st.integers(1, most)) for most in (6, 9, 4))
    scale, far = draw(st.sampled_from((0.0, 0.3, 3.0))), draw(st.sampled_from((0.0, 0.1, 3.0)))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states, head = scale * drawn(actions, hidden), drawn(vocabulary, hidden)
    teacher = Predictions(states + far * drawn(actions, hidden), head + far * drawn(*head.shape))
    beta, temperature = draw(st.sampled_from(betas)), draw(st.sampled_from((0.5, 1.0, 1.7)))
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


PEERS = ("TRL", "Liger")


def teacher_gap(case: TeacherCase, peer: str) -> float:
    """The largest difference of value or gradient from a peer, over 1 + its size."""
    pairs = zip(solved(case, "ours"), solved(case, peer), strict=True)
    return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)
