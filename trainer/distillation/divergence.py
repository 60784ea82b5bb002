# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""How far the student's distribution is from the teacher's: the generalised Jensen-Shannon divergence of
GKD (arXiv 2306.13649), at each action over the whole vocabulary.

    beta = 1       D = KL(student || teacher)                            reverse KL, seeks a mode
    beta = 0       D = KL(teacher || student)                            forward KL, covers all modes
    0 < beta < 1   D = beta KL(teacher || m) + (1 - beta) KL(student || m)
                   m = beta teacher + (1 - beta) student

Only the student has a gradient. The logits of both exist for a chunk of actions only, and the backward
pass computes each chunk again. If one output head has more rows than the other (padding behind the same
tokenizer), both distributions are those over the rows that both have.

Shape suffixes: M actions, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from trainer.forward.predictions import Predictions

TENSORS = 4
"""How many tensors of the size of a chunk's logits are needed at a time, compared with the
log-probabilities of single tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Student and teacher at each action: the divergence (M), which has a gradient, the
    log-probabilities (M) of the sampled token under both, and the student's entropy (M)."""

    divergence_M: torch.Tensor
    student_M: torch.Tensor
    teacher_M: torch.Tensor
    entropy_M: torch.Tensor


def compare(
    student: Predictions,
    teacher: Predictions,
    target_M: torch.Tensor,
    *,
    beta: float,
    temperature: float,
    chunk_elements: int,
) -> Comparison:
    """Compare both distributions at `temperature`. `target_M` are the sampled tokens."""
    num_tokens = min(student.num_tokens, teacher.num_tokens)
    size = max(1, chunk_elements // (TENSORS * num_tokens))

    def compare_chunk(
        student_C: Predictions, teacher_C: Predictions, target_C: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ours = student_C.logprobs(temperature=temperature, num_tokens=num_tokens)
        theirs = teacher_C.logprobs(temperature=temperature, num_tokens=num_tokens)
        found = divergence(ours, theirs, beta=beta)
        with torch.no_grad():
            chosen = (one.gather(-1, target_C[:, None])[:, 0] for one in (ours, theirs))
            return found, *chosen, -(ours.exp() * ours).sum(dim=-1)

    chunks = []
    for start in range(0, len(target_M), size):
        here = slice(start, start + size)
        parts = student.select(here), teacher.select(here), target_M[here]
        # Nothing here draws random numbers, so there is no random state to restore.
        chunks.append(
            checkpoint(compare_chunk, *parts, use_reentrant=False, preserve_rng_state=False)
        )
    return Comparison(*(torch.cat(values) for values in zip(*chunks, strict=True)))


def divergence(
    student_M_V: torch.Tensor, teacher_M_V: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """The divergence (M, in nats) between two tables of log-probabilities."""
    if beta == 1.0:
        return kl(student_M_V, teacher_M_V)
    if beta == 0.0:
        return kl(teacher_M_V, student_M_V)
    mixture_M_V = torch.logaddexp(student_M_V + math.log1p(-beta), teacher_M_V + math.log(beta))
    return beta * kl(teacher_M_V, mixture_M_V) + (1 - beta) * kl(student_M_V, mixture_M_V)


def kl(p_M_V: torch.Tensor, q_M_V: torch.Tensor) -> torch.Tensor:
    """KL(p || q) (M) of two tables of log-probabilities."""
    return (p_M_V.exp() * (p_M_V - q_M_V)).sum(dim=-1)
