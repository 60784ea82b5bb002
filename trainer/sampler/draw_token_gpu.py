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
    mass_R_V = scaled_R_V.softmax(dim=-1)
    likeliest_R = scaled_R_V.argmax(dim=-1)
    upto_R_B = _running(_block_sums(mass_R_V))
    target_R = uniform_R.double() * upto_R_B[:, -1]
    block_R = (upto_R_B <= target_R[:, None]).sum(dim=-1).clamp(max=upto_R_B.shape[1] - 1)
    inside_R_W = _running(_masses_of_block(mass_R_V, block_R).double())
    before_R = F.pad(upto_R_B, (1, 0)).gather(-1, block_R[:, None])[:, 0]
    # The block's own sum may round below the rest of the target, so stay within its last mass.
    left_R = (target_R - before_R).minimum(inside_R_W[:, -1].nextafter(torch.zeros_like(target_R)))
    place_R = (inside_R_W <= left_R[:, None]).sum(dim=-1).clamp(max=WIDTH - 1)
    token_R = (block_R * WIDTH + place_R).clamp(max=mass_R_V.shape[1] - 1)
    token_R = likeliest_R.where(greedy_R, token_R)
    # The likeliest token has a mass far above the smallest fp32 number, whatever the vocabulary.
    log_sum_R = _at(scaled_R_V, likeliest_R) - _at(mass_R_V, likeliest_R).log()
    return token_R, _at(scaled_R_V, token_R) - log_sum_R


def _block_sums(mass_R_V: torch.Tensor) -> torch.Tensor:
    """The mass (R, B, float64) of each block. The last block may be shorter than WIDTH."""
    whole = mass_R_V.shape[1] // WIDTH * WIDTH
    sums_R_B = mass_R_V[:, :whole].unflatten(-1, (-1, WIDTH)).sum(dim=-1, dtype=torch.float64)
    if whole == mass_R_V.shape[1]:
        return sums_R_B
    rest_R_1 = mass_R_V[:, whole:].sum(dim=-1, dtype=torch.float64, keepdim=True)
    return torch.cat((sums_R_B, rest_R_1), dim=-1)


def _masses_of_block(mass_R_V: torch.Tensor, block_R: torch.Tensor) -> torch.Tensor:
    """The masses (R, W) of one block of each row, 0 after the end of the vocabulary."""
    vocabulary = mass_R_V.shape[1]
    place_R_W = block_R[:, None] * WIDTH + torch.arange(WIDTH, device=mass_R_V.device)
    found_R_W = mass_R_V.gather(-1, place_R_W.clamp(max=vocabulary - 1))
    return found_R_W.masked_fill(place_R_W >= vocabulary, 0.0)


def _at(x_R_V: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
    """The number (R, float64) of one token of each row."""
    return x_R_V.gather(-1, token_R[:, None])[:, 0].double()


def _running(x_R_W: torch.Tensor) -> torch.Tensor:
    """The running sum along the last dimension."""
    width = x_R_W.shape[-1]
    return x_R_W @ torch.ones(width, width, dtype=x_R_W.dtype, device=x_R_W.device).triu()
