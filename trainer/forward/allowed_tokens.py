# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""The tokens that each action was drawn from, where a grammar allowed only some of the vocabulary.

A constrained token is drawn from the policy over the allowed tokens: log p = z - logsumexp over them.
So the logits of all other tokens are set to a number whose exponential is exactly 0. It is finite, so
that neither entropies nor gradients become NaN.

Legend: M actions, C actions of a chunk, V vocabulary, K different masks, B bytes of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

FORBIDDEN = -1e30


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """The mask of each action: `mask_M` is an index into `bits_K_B`, or -1 where every token is
    allowed."""

    mask_M: torch.Tensor
    bits_K_B: torch.Tensor
    """uint8; bit `v % 8` of byte `v // 8` says whether token v is allowed"""

    def __getitem__(self, here: slice) -> "AllowedTokens":
        return AllowedTokens(self.mask_M[here], self.bits_K_B)

    def restrict(self, logits_C_V: torch.Tensor) -> torch.Tensor:
        """The logits, with FORBIDDEN for each token that is not allowed. Rows in which every token is
        allowed keep their bits."""
        row_R = (self.mask_M >= 0).nonzero()[:, 0]
        if len(row_R) == 0:
            return logits_C_V
        bits_R_B = self.bits_K_B.index_select(0, self.mask_M.index_select(0, row_R))
        table_256_8 = _bits_of_bytes(bits_R_B.device)
        allowed_R_V = table_256_8.index_select(0, bits_R_B.flatten().int()).view(len(row_R), -1)
        forbidden_C_V = torch.zeros_like(logits_C_V, dtype=torch.bool)
        known = min(allowed_R_V.shape[1], logits_C_V.shape[1])
        forbidden_C_V[row_R] = True
        forbidden_C_V[row_R, :known] = ~allowed_R_V[:, :known]
        return logits_C_V.masked_fill(forbidden_C_V, FORBIDDEN)


@cache
def _bits_of_bytes(device: torch.device) -> torch.Tensor:
    """The bits (256, 8, bool) of each byte, the lowest first."""
    shift_8 = torch.arange(8, device=device)
    return ((torch.arange(256, device=device)[:, None] >> shift_8) & 1).bool()


def allowed_tokens(
    masks: Sequence[bytes | None], *, device: torch.device | None = None
) -> AllowedTokens | None:
    """The masks of actions, in their order; None where every token is allowed. The result is None if
    no action has a mask."""
    numbers = {mask: number for number, mask in enumerate(dict.fromkeys(m for m in masks if m))}
    if not numbers:
        return None
    bits_K_B = torch.frombuffer(bytearray(b"".join(numbers)), dtype=torch.uint8)
    return AllowedTokens(
        torch.tensor([-1 if m is None else numbers[m] for m in masks], device=device),
        bits_K_B.view(len(numbers), -1).to(device),
    )
