# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Attention over packed rows of any length, without padding. Every segment is a range of N. Its queries
see the keys of its context, and the segment's own keys up to the query's own position.

On CUDA, with states in half precision, this is one flash kernel over all segments (PyTorch's
`varlen_attn`). Everywhere else it is one `scaled_dot_product_attention` per segment under the same rule.
The tests compare the kernel with the second form, which a GPU also uses for fp32.

Legend: N packed tokens, S segments, U keys of all segments one after the other, A query heads, K key
heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.forward.decoder import Attend

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens from start to end (exclusive) of N. They see the `num_context` tokens from
    context_start on, and the segment's own tokens up to themselves."""

    start: int
    end: int
    context_start: int = 0
    num_context: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return self.num_context + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The segments of a micro-batch in the kernel's form. Segments follow one another in N, so only keys
    are gathered, and only where a context is shared (`key_U` is None otherwise)."""

    segments: tuple[Segment, ...]
    query_ends_S: torch.Tensor
    """0, then where each segment's queries end"""
    key_ends_S: torch.Tensor
    key_U: torch.Tensor | None
    longest_query: int
    longest_keys: int


def spans_of(segments: Sequence[Segment], *, device: torch.device | None) -> Spans:
    """The segments in the form that `varlen_attend` needs. Raises ValueError unless they cover N in
    order."""
    starts = [0, *(s.end for s in segments)]
    if [s.start for s in segments] != starts[:-1]:
        raise ValueError("the segments of a micro-batch must follow one another")
    keys: list[int] = []
    ends = [0]
    for segment in segments:
        keys += range(segment.context_start, segment.context_start + segment.num_context)
        keys += range(segment.start, segment.end)
        ends.append(len(keys))
    shared = any(segment.num_context for segment in segments)
    return Spans(
        segments=tuple(segments),
        query_ends_S=torch.tensor(starts, dtype=torch.int32, device=device),
        key_ends_S=torch.tensor(ends, dtype=torch.int32, device=device),
        key_U=torch.tensor(keys, device=device) if shared else None,
        longest_query=max(s.num_tokens for s in segments),
        longest_keys=max(s.num_keys for s in segments),
    )


def varlen_attend(spans: Spans) -> Attend:
    """Attention over these segments. It uses the kernel if the tensors allow it, and otherwise computes
    one segment after the other."""

    def attend(
        layer: int, q_N_A_D: torch.Tensor, k_N_K_D: torch.Tensor, v_N_K_D: torch.Tensor
    ) -> torch.Tensor:
        if spans.key_U is not None:
            k_N_K_D, v_N_K_D = (x.index_select(0, spans.key_U) for x in (k_N_K_D, v_N_K_D))
        attended = _flash if q_N_A_D.is_cuda and q_N_A_D.dtype in HALF else _by_segment
        return attended(spans, q_N_A_D, k_N_K_D, v_N_K_D).flatten(1)

    return attend


def _flash(
    spans: Spans, q_N_A_D: torch.Tensor, k_U_K_D: torch.Tensor, v_U_K_D: torch.Tensor
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
        window_size=(-1, 0),
        enable_gqa=q_N_A_D.shape[1] != k_U_K_D.shape[1],
    )
    assert isinstance(out, torch.Tensor)  # noqa: S101 - a pair only where its log-sums are asked for
    return out


def _by_segment(
    spans: Spans, q_N_A_D: torch.Tensor, k_U_K_D: torch.Tensor, v_U_K_D: torch.Tensor
) -> torch.Tensor:
    outputs, first = [], 0
    for segment in spans.segments:
        keys = slice(first, first + segment.num_keys)
        first = keys.stop
        queries = slice(segment.start, segment.end)
        outputs.append(_causal(q_N_A_D[queries], k_U_K_D[keys], v_U_K_D[keys]))
    return torch.cat(outputs)


def _causal(q_T_A_D: torch.Tensor, k_U_K_D: torch.Tensor, v_U_K_D: torch.Tensor) -> torch.Tensor:
    """Causal attention with at least as many keys as queries. The last query sees all keys, the query
    before it sees all but one, and so on."""
    num_queries, num_keys = len(q_T_A_D), len(k_U_K_D)
    plain = num_queries == num_keys
    mask = None
    if not plain:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_T_A_D.device)
        mask = seen.tril(num_keys - num_queries)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_T_A_D, k_U_K_D, v_U_K_D))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=plain, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)
