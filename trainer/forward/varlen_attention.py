"""Attention over packed rows of any length, without padding. Every segment is a range of N. Its queries
see the keys of its context, and the segment's own keys up to the query's own position.

On CUDA, with states in half precision, this is one flash kernel over all segments: PyTorch's
`varlen_attn`, or with `advanced.compile` the one that is compiled from PyTorch's `flex_attention`
(`trainer/forward/compiled_attention.py`). Everywhere else it is one `scaled_dot_product_attention` per
segment under the same rule. The tests compare the kernels with the last form, which a GPU also uses for
fp32.

Legend: N packed tokens, S segments, U keys of all segments one after the other, A query heads, K key
heads, D head size.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from trainer.forward.compiled_attention import CompiledAttention
from trainer.forward.decoder import Attend
from trainer.forward.spans import Spans

HALF = (torch.bfloat16, torch.float16)


def varlen_attend(
    spans: Spans, *, compiled: bool = False, windows: Sequence[int | None] = ()
) -> Attend:
    """Attention over these segments. It uses a kernel if the tensors allow it, and otherwise computes
    one segment after the other. With `compiled` the kernel is that of `flex_attention`. `windows`: how
    many tokens a token sees in each layer."""
    kernels = {
        window: CompiledAttention(spans, window=window)
        if compiled
        else partial(_flash, spans, window)
        for window in dict.fromkeys((None, *windows))
    }

    def attend(
        layer: int, q_N_A_D: torch.Tensor, k_N_K_D: torch.Tensor, v_N_K_D: torch.Tensor
    ) -> torch.Tensor:
        if spans.key_U is not None:
            k_N_K_D, v_N_K_D = (x.index_select(0, spans.key_U) for x in (k_N_K_D, v_N_K_D))
        has_kernel = q_N_A_D.is_cuda and q_N_A_D.dtype in HALF
        window = windows[layer] if windows else None
        attended = kernels[window] if has_kernel else partial(_by_segment, spans, window)
        return attended(q_N_A_D, k_N_K_D, v_N_K_D).flatten(1)

    return attend


def _flash(
    spans: Spans,
    window: int | None,
    q_N_A_D: torch.Tensor,
    k_U_K_D: torch.Tensor,
    v_U_K_D: torch.Tensor,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q_N_A_D,
        k_U_K_D,
        v_U_K_D,
        spans.query_ends_S,
        spans.key_ends_S,
        spans.longest_query,
        spans.longest_keys,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_N_A_D.shape[1] != k_U_K_D.shape[1],
    )
    assert isinstance(out, torch.Tensor)  # noqa: S101 - a pair only where its log-sums are asked for
    return out


def _by_segment(
    spans: Spans,
    window: int | None,
    q_N_A_D: torch.Tensor,
    k_U_K_D: torch.Tensor,
    v_U_K_D: torch.Tensor,
) -> torch.Tensor:
    outputs, first = [], 0
    for segment in spans.segments:
        keys = slice(first, first + segment.num_keys)
        first = keys.stop
        queries = slice(segment.start, segment.end)
        outputs.append(_causal(window, q_N_A_D[queries], k_U_K_D[keys], v_U_K_D[keys]))
    return torch.cat(outputs)


def _causal(
    window: int | None, q_T_A_D: torch.Tensor, k_U_K_D: torch.Tensor, v_U_K_D: torch.Tensor
) -> torch.Tensor:
    """Causal attention with at least as many keys as queries. The last query sees all keys, the query
    before it sees all but one, and so on. With a window each sees the last of these."""
    num_queries, num_keys = len(q_T_A_D), len(k_U_K_D)
    plain = num_queries == num_keys and window is None
    mask = None
    if not plain:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_T_A_D.device)
        mask = seen.tril(num_keys - num_queries)
        if window is not None:
            mask = mask.triu(num_keys - num_queries + 1 - window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_T_A_D, k_U_K_D, v_U_K_D))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=plain, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)
