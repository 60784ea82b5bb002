"""Draws one token per row from its logits, with the logprob that it was drawn at.

All numbers are float64. The logits are divided by the temperature, then come softmax and cumulative sum.
The row's uniform number selects the first token whose cumulative mass exceeds it. On a CPU it is found
without the exact sum where a less exact one decides the same (`trainer/native/pick.py`). Temperature 0
is the argmax, and its logprob is that of temperature 1. With top_p < 1 the mass outside the nucleus is
removed first, and the logprob is that of the renormalised rest. This is for evaluation only: in training
the renormalisation would bias the ratio.

A row with a mask is drawn from its allowed tokens only, at a logprob over these tokens. The learner
applies the same mask (`trainer/forward/allowed_tokens.py`), so its ratios are exact. Other rows keep
their bits.
"""

from collections.abc import Sequence

import torch

from trainer.forward.allowed_tokens import allowed_tokens
from trainer.native.interface import pick
from trainer.sampler.draw_token_gpu import draw_on_gpu


def draw_tokens(
    logits_R_V: torch.Tensor,
    *,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
    masks: Sequence[bytes | None] = (),
) -> tuple[list[int], list[float]]:
    """The token id and the logprob that were drawn for each row. `masks` are the allowed tokens of each
    row (`trainer/grammar/token_masks.py`), None for all."""
    allowed = allowed_tokens(masks, device=logits_R_V.device)
    if allowed is not None:
        logits_R_V = allowed.restrict(logits_R_V)
    draw = draw_on_device if logits_R_V.is_cuda else draw_exactly
    return draw(logits_R_V, temperatures=temperatures, top_ps=top_ps, uniforms=uniforms)


def draw_on_device(
    logits_R_V: torch.Tensor,
    *,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float]]:
    """The draws of `draw_tokens` on a GPU. A running sum there is not deterministic, so rows with top_p
    are drawn again on the CPU. The other rows keep the bits that they have without such company."""
    temperature_R, uniform_R = torch.tensor(
        [temperatures, uniforms], dtype=torch.float64, device=logits_R_V.device
    )
    token_R, logprob_R = draw_on_gpu(logits_R_V, temperature_R, uniform_R)
    tokens, logprobs = token_R.tolist(), logprob_R.tolist()
    cut = [i for i, top_p in enumerate(top_ps) if top_p < 1]
    if cut:
        drawn = draw_exactly(
            logits_R_V[cut].cpu(),
            temperatures=[temperatures[i] for i in cut],
            top_ps=[top_ps[i] for i in cut],
            uniforms=[uniforms[i] for i in cut],
        )
        for i, token, logprob in zip(cut, *drawn, strict=True):
            tokens[i], logprobs[i] = token, logprob
    return tokens, logprobs


def draw_exactly(
    logits_R_V: torch.Tensor,
    *,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float]]:
    """The draws of `draw_tokens` on a CPU."""
    scaled_R_V = logits_R_V.double()
    temperature_R = scaled_R_V.new_tensor(temperatures)
    greedy_R = temperature_R == 0
    if any(temperature not in (0, 1) for temperature in temperatures):
        scaled_R_V = scaled_R_V / temperature_R.where(~greedy_R, 1.0)[:, None]
    logprobs_R_V = scaled_R_V.log_softmax(dim=-1)
    if min(top_ps) < 1:
        logprobs_R_V = _nucleus(logprobs_R_V, scaled_R_V.new_tensor(top_ps))
    uniform_R = scaled_R_V.new_tensor(uniforms)
    picked_R = pick(logprobs_R_V, uniform_R)
    if picked_R is None:
        picked_R = pick_exactly(logprobs_R_V, uniform_R)
    if 0 in temperatures:
        picked_R = logprobs_R_V.argmax(dim=-1).where(greedy_R, picked_R)
    chosen_R = logprobs_R_V.gather(-1, picked_R[:, None])[:, 0]
    return picked_R.tolist(), chosen_R.tolist()


def pick_exactly(logprobs_R_V: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The first token of each row whose cumulative mass exceeds that share of all mass, (R)."""
    mass_R_V = logprobs_R_V.exp()
    mass_R_V = torch.cumsum(mass_R_V, dim=-1, out=mass_R_V)
    drawn_R = uniform_R * mass_R_V[:, -1]
    return _count_up_to(mass_R_V, drawn_R).clamp(max=logprobs_R_V.shape[-1] - 1)


def _count_up_to(mass_R_V: torch.Tensor, drawn_R: torch.Tensor) -> torch.Tensor:
    """How many of a row's numbers, which do not fall, are at most its own one (R)."""
    return torch.searchsorted(mass_R_V, drawn_R[:, None], right=True)[:, 0]


def _nucleus(logprobs_R_V: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p, and renormalise. Rows that
    keep all tokens also keep their exact bits, whatever the other rows are."""
    ordered_R_V, order_R_V = logprobs_R_V.sort(dim=-1, descending=True, stable=True)
    probs_R_V = ordered_R_V.exp()
    before_R_V = probs_R_V.cumsum(dim=-1) - probs_R_V
    ordered_R_V = ordered_R_V.masked_fill(before_R_V >= top_p_R[:, None], float("-inf"))
    kept_R_V = torch.empty_like(ordered_R_V).scatter(-1, order_R_V, ordered_R_V)
    return kept_R_V.log_softmax(dim=-1).where(top_p_R[:, None] < 1, logprobs_R_V)
