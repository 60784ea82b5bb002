"""Student and teacher as states and heads that our divergence and the oracles can read, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from schemas.config import LossAggregation
from schemas.learner import GradedGroup
from tests.oracles import theirs_trl, theirs_verl
from tests.oracles.available import oracle
from tests.oracles.cases import PROMPT, Answer, Case, TablePolicy, graded_groups, times
from tests.oracles.comparisons import AGGREGATIONS, LONGEST, Compared
from trainer.distillation.divergence import compare
from trainer.distillation.recorded import RecordedTeacher
from trainer.distillation.step import (
    DistillationRun,
    compared_rows,
    micro_batch_loss,
    micro_batches,
)
from trainer.forward.predictions import Predictions
from trainer.objective.aggregate import token_weights
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.metrics import Means

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


def on_a_server(aggregation: LossAggregation) -> Callable[[Case], Compared]:
    """Distillation from the recorded logprobs of a teacher, here those of pi_ref. For TRL and verl it is
    a policy gradient without a clip, whose advantages (B, T) are verl's: minus k1."""
    asked = AGGREGATIONS[aggregation]

    def compare(case: Case) -> Compared:
        advantage = -theirs_verl.CORE.kl_penalty(case.now, case.reference, "k1") * case.mask
        unclipped: dict[str, Any] = {"clip_ratio_low": 1.0, "clip_ratio_high": theirs_verl.NEVER}
        options: dict[str, Any] = {
            "epsilon_low": 1.0,
            "epsilon_high": theirs_verl.NEVER,
            "loss_type": asked.loss_type,
            "max_completion_length": LONGEST,
        }
        factor = asked.factor(case)
        return recorded_answer(case, aggregation), {
            "TRL": times(theirs_trl.loss(case, advantage, **options), factor),
            "verl": theirs_verl.policy_loss(
                case, "vanilla", advantage, aggregation=aggregation, longest=LONGEST, **unclipped
            ),
        }

    return compare


def recorded_answer(case: Case, aggregation: LossAggregation) -> Answer:
    """Our loss, computed through the whole of `trainer/distillation/step.py`."""
    policy: Any = TablePolicy(case)
    policy.before = False
    settings = Hyperparameters(
        temperature=1.0,
        aggregation=aggregation,
        max_response_length=LONGEST,
        micro_batch_tokens=case.micro_batch_tokens,
    )
    chat: Any = None
    run = DistillationRun(RecordedTeacher("t"), 1.0, settings, chat)
    rows, means = compared_rows(taught(case), run), Means()
    weights = token_weights([row.student for row in rows], settings)
    for micro, read in micro_batches(policy, rows, run):
        micro_batch_loss(policy, micro, read, weights, run, means=means).backward()
    assert policy.leaf.grad is not None
    return Answer(means.values()["train/loss"], policy.leaf.grad)


def taught(case: Case) -> tuple[GradedGroup, ...]:
    """The case with pi_ref as the teacher that read its rows."""
    groups, width = [], case.mask.shape[1]
    for group in graded_groups(case):
        samples = []
        for sample in group.samples:
            (row,) = sample.sequences
            said = case.reference[row.tokens[-1] // width].tolist()
            read = row.model_copy(update={"teacher_logprobs": (0.0,) * PROMPT + tuple(said)})
            samples.append(sample.model_copy(update={"sequences": (read,)}))
        groups.append(replace(group, samples=tuple(samples)))
    return tuple(groups)


ON_A_SERVER = {"distill, on a server": on_a_server("token_mean")}
"""The row of the table of agreement."""
