"""Draws on a GPU what `draw_tokens` draws, without leaving the device or waiting for it.

The rule is the same: the first token whose cumulative mass exceeds the row's uniform number. A GPU is
slow at a cumulative sum over the whole vocabulary in float64, and its result is not deterministic. So
masses are fp32 and are summed in float64 per block of tokens. The block is found first, then the token
in it. Sums are products with a triangle of ones, which have a fixed order and so the same bits. A draw
differs from `draw_tokens` only where the number falls within fp32 rounding of a boundary.

Legend: R rows, V vocabulary, B blocks, W tokens of a block.
"""

import torch
import torch.nn.functional as F

WIDTH = 512


def draw_on_gpu(
    logits_R_V: torch.Tensor, temperature_R: torch.Tensor, uniform_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (R) and their logprobs (R, float64). Temperature 0 is the argmax, at the logprob of
    temperature 1. The host reads no value, so this can be part of a CUDA graph."""
    greedy_R = temperature_R == 0
    scaled_R_V = logits_R_V.float() / temperature_R.float().where(~greedy_R, 1.0)[:, None]
    log_sum_R = scaled_R_V.logsumexp(dim=-1)
    mass_R_V = (scaled_R_V - log_sum_R[:, None]).exp()
    rows, vocabulary = mass_R_V.shape
    mass_R_B_W = F.pad(mass_R_V, (0, -vocabulary % WIDTH)).view(rows, -1, WIDTH)
    upto_R_B = _running(mass_R_B_W.sum(dim=-1, dtype=torch.float64))
    target_R = uniform_R.double() * upto_R_B[:, -1]
    block_R = (upto_R_B <= target_R[:, None]).sum(dim=-1).clamp(max=upto_R_B.shape[1] - 1)
    inside_R_W = _running(mass_R_B_W[torch.arange(rows, device=mass_R_V.device), block_R].double())
    before_R = F.pad(upto_R_B, (1, 0)).gather(-1, block_R[:, None])[:, 0]
    # The block's own sum may round below the rest of the target, so stay within its last mass.
    left_R = (target_R - before_R).minimum(inside_R_W[:, -1].nextafter(torch.zeros_like(target_R)))
    place_R = (inside_R_W <= left_R[:, None]).sum(dim=-1).clamp(max=WIDTH - 1)
    token_R = (block_R * WIDTH + place_R).clamp(max=vocabulary - 1)
    token_R = scaled_R_V.argmax(dim=-1).where(greedy_R, token_R)
    chosen_R = scaled_R_V.gather(-1, token_R[:, None])[:, 0].double() - log_sum_R.double()
    return token_R, chosen_R


def _running(x_R_W: torch.Tensor) -> torch.Tensor:
    """The running sum along the last dimension."""
    width = x_R_W.shape[-1]
    return x_R_W @ torch.ones(width, width, dtype=x_R_W.dtype, device=x_R_W.device).triu()
