"""Log-probabilities of the chosen tokens, computed from the hidden states without keeping the logits.

    logprob_m = z_m[target_m] - logsumexp(z_m),   z_m = head h_m / temperature
    entropy_m = - sum_v p_mv log p_mv,            d entropy_m / d z_mv = - p_mv (log p_mv + entropy_m)

Where a grammar allowed only some tokens, z is FORBIDDEN at all others
(`trainer/forward/allowed_tokens.py`).

The logits of a step would be its largest tensor by far: with a vocabulary of 150,000 tokens they take
600 kB per action, and their gradient takes the same again. Here only a chunk of actions has its logits
at a time. The backward pass computes each chunk again, unless it is among the first ones, whose numbers
were kept. With a small vocabulary or few actions these are all. In addition one or two numbers per
action are kept.

Legend: M actions, H hidden, V vocabulary, C actions of a chunk, K likeliest tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer.forward.allowed_tokens import AllowedTokens
from trainer.forward.lm_head import logits_of

CHUNK_ELEMENTS = 4 << 20
"""How many logits are computed at a time (16 MiB in fp32). The number is constant, because another split
can give other bits."""
CUDA_CHUNK_ELEMENTS = 64 << 20
"""The same on a CUDA GPU (256 MiB in fp32), which reads the whole head for each chunk. With 27 actions a
chunk, that took a quarter of a step."""
KEPT_ELEMENTS = 32 << 20
"""How many of these numbers a pass keeps for its gradient (128 MiB in fp32). The backward pass then
saves one product with the head, a third of the arithmetic of these logits. It changes no bit."""

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the logits (C, V) from hidden states (C, H) and the weight of the head (V, H)."""


def chosen_logprobs(
    hidden_M_H: torch.Tensor,
    head_V_H: torch.Tensor,
    target_M: torch.Tensor,
    *,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
    kept_elements: int = 0,
    trains_entropy: bool = False,
    logits: Logits = logits_of,
    allowed: AllowedTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability (M) of each target at `temperature`, and the entropy (M, in nats) of the
    distribution that the target was drawn from, which is over its `allowed` tokens. The entropy has a
    gradient with `trains_entropy` only. `chunk_elements` logits are computed at a time, and numbers of
    up to `kept_elements` of them are kept if there is a gradient."""
    has_gradient = torch.is_grad_enabled() and (hidden_M_H.requires_grad or head_V_H.requires_grad)
    kept = kept_elements if has_gradient else 0
    run = Run(temperature, chunk_elements, kept, logits, allowed)
    logprob_M, entropy_M = _ChosenLogprobs.apply(
        hidden_M_H, head_V_H, target_M, run, trains_entropy
    )
    return logprob_M, entropy_M


@dataclass(frozen=True, slots=True)
class Run:
    """How logits are computed, and how many are kept."""

    temperature: float
    chunk_elements: int
    kept_elements: int
    logits: Logits
    allowed: AllowedTokens | None = None

    def chunks(self, hidden_M_H: torch.Tensor, head_V_H: torch.Tensor) -> Iterator[slice]:
        return _chunks(hidden_M_H, head_V_H, self.chunk_elements)

    def scaled_logits(
        self, hidden_M_H: torch.Tensor, head_V_H: torch.Tensor, here: slice
    ) -> torch.Tensor:
        """The logits of the actions `here` at the temperature, FORBIDDEN for tokens not allowed."""
        z_C_V = self.logits(hidden_M_H[here], head_V_H).div_(self.temperature)
        return z_C_V if self.allowed is None else self.allowed[here].restrict(z_C_V)


@torch.no_grad()
def likeliest_tokens(
    hidden_M_H: torch.Tensor,
    head_V_H: torch.Tensor,
    *,
    temperature: float,
    most: int,
    allowed: AllowedTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids (M, K) of the `most` likeliest of the `allowed` tokens of each row, the likeliest first,
    and their log-probabilities (M, K) at `temperature`. Ids that are not allowed have a log-probability
    below -1e29."""
    run = Run(temperature, CHUNK_ELEMENTS, 0, logits_of, allowed)
    found = [
        run.scaled_logits(hidden_M_H, head_V_H, here)
        .log_softmax(dim=-1)
        .topk(min(most, len(head_V_H)), dim=-1)
        for here in run.chunks(hidden_M_H, head_V_H)
    ]
    return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_M_H: torch.Tensor,
        head_V_H: torch.Tensor,
        target_M: torch.Tensor,
        run: Run,
        trains_entropy: bool,  # noqa: FBT001 - autograd passes positions only
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden_M_H.dtype, torch.float32)
        logprob_M, entropy_M, total_M = (
            hidden_M_H.new_empty(len(hidden_M_H), dtype=wide) for _ in range(3)
        )
        kept: dict[int, torch.Tensor] = {}
        room = run.kept_elements
        for here in run.chunks(hidden_M_H, head_V_H):
            z_C_V = run.scaled_logits(hidden_M_H, head_V_H, here)
            total_M[here] = torch.logsumexp(z_C_V, dim=-1)
            all_C_V = z_C_V.sub_(total_M[here, None])
            logprob_M[here] = all_C_V.gather(-1, target_M[here, None])[:, 0]
            entropy_M[here] = -torch.linalg.vecdot(all_C_V.exp(), all_C_V)
            if all_C_V.numel() <= room:
                kept[here.start] = all_C_V
                room -= all_C_V.numel()
        kept_M = entropy_M if trains_entropy else None
        ctx.save_for_backward(hidden_M_H, head_V_H, target_M, total_M, kept_M)
        ctx.run, ctx.kept = run, kept
        if not trains_entropy:
            ctx.mark_non_differentiable(entropy_M)
        return logprob_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_M: torch.Tensor, grad_entropy_M: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden_M_H, head_V_H, target_M, total_M, entropy_M = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_M_H) if wants_hidden else None
        grad_head = torch.zeros_like(head_V_H) if wants_head else None
        run: Run = ctx.run
        for here in run.chunks(hidden_M_H, head_V_H):
            scaled_C_1 = grad_M[here, None] / run.temperature
            all_C_V = ctx.kept.pop(here.start, None)  # it is overwritten, so it serves once
            if all_C_V is None:
                z_C_V = run.scaled_logits(hidden_M_H, head_V_H, here)
                all_C_V = z_C_V.sub_(total_M[here, None])
            if entropy_M is not None:
                slope_C_1 = grad_entropy_M[here, None] / run.temperature
                both_C_V = (all_C_V + entropy_M[here, None]).mul_(slope_C_1).add_(scaled_C_1)
                grad_C_V = all_C_V.exp_().mul_(both_C_V).neg_()
            else:
                grad_C_V = all_C_V.exp_().mul_(-scaled_C_1)
            grad_C_V.scatter_add_(-1, target_M[here, None], scaled_C_1)
            grad_C_V = grad_C_V.to(head_V_H.dtype)
            if grad_hidden is not None:
                grad_hidden[here] = grad_C_V @ head_V_H
            if grad_head is not None:
                grad_head.addmm_(grad_C_V.t(), hidden_M_H[here])
        return grad_hidden, grad_head, None, None, None


def _chunks(
    hidden_M_H: torch.Tensor, head_V_H: torch.Tensor, chunk_elements: int
) -> Iterator[slice]:
    size = max(1, chunk_elements // len(head_V_H))
    for start in range(0, len(hidden_M_H), size):
        yield slice(start, start + size)
