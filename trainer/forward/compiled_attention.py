"""Attention over packed rows by `flex_attention`, which `torch.compile` turns into one kernel.

Its backward pass has equal bits in every run, because each block of queries and each block of keys sums
its own gradients. The flash kernels have that only at half of their speed, because their blocks take
turns to add to the same sums.

Legend: N packed tokens, U keys of all segments one after the other, A query heads, K key heads, D head
size, I blocks of queries, J blocks of keys.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.forward.spans import Spans

BLOCK = 128
SMALLEST = 2 * BLOCK
"""Queries and keys are padded to lengths of SMALLEST times 1, 1.5, 2, 3, 4, 6 and so on. Each pair of
lengths gets a kernel of its own, which is compiled for exactly these. So the bits of a pass do not
depend on the shapes that the process met before, as they may with a kernel for all shapes."""

MOST_KERNELS = 2048
"""Of one process. Twenty lengths reach up to 256 thousand tokens, and there may be more keys than
queries."""


Backend: TypeAlias = str | Callable[..., Any]
"""A compiler, as `torch.compile` takes it."""


class CompiledAttention:
    """The attention of one micro-batch. Its mask is made for the first layer and serves all of them."""

    def __init__(
        self, spans: Spans, *, backend: Backend | None = "inductor", window: int | None = None
    ) -> None:
        """`backend` compiles it. None runs it as it is, which needs no GPU. `window`: how many tokens a
        token sees."""
        self._spans, self._window = spans, window
        plain: Callable[..., Any] = flex_attention
        self._run = _kernel(backend) if backend else plain
        self._mask: BlockMask | None = None

    def __call__(
        self, q_N_A_D: torch.Tensor, k_U_K_D: torch.Tensor, v_U_K_D: torch.Tensor
    ) -> torch.Tensor:
        """Return the attended values (N, A, D)."""
        if self._mask is None:
            self._mask = block_mask_of(self._spans, device=q_N_A_D.device, window=self._window)
        padded = (_pad(x).transpose(0, 1)[None] for x in (q_N_A_D, k_U_K_D, v_U_K_D))
        grouped = q_N_A_D.shape[1] != k_U_K_D.shape[1]
        # At the limit of compilations the plain form would run instead, which has other bits.
        # `fullgraph` makes that an error.
        limits = {"recompile_limit": MOST_KERNELS, "accumulated_recompile_limit": MOST_KERNELS}
        with torch._dynamo.config.patch(limits):
            out = self._run(*padded, block_mask=self._mask, enable_gqa=grouped)
        return out[0].transpose(0, 1)[: len(q_N_A_D)]


@cache
def _kernel(backend: Backend) -> Callable[..., Any]:
    """Attention with a kernel for each pair of lengths, compiled once per process. The settings of a
    kernel are chosen without measuring, because others have other bits."""
    compiled = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend)
    if backend == "inductor":
        return compiled(flex_attention, options={"deterministic": True})
    return compiled(flex_attention)


def _pad(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, padded_length(len(x)) - len(x)))


def padded_length(num: int) -> int:
    """The smallest length with a kernel that holds so many tokens."""
    length = SMALLEST
    while length < num:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return length


def block_mask_of(spans: Spans, *, device: torch.device, window: int | None = None) -> BlockMask:
    """The keys that the queries of a micro-batch see, by blocks: those that all queries of a block see,
    and those of which some see some. A query sees the keys from `first` up to `end`."""
    sizes = torch.tensor([s.num_tokens for s in spans.segments], device=device)
    keys = torch.tensor([s.num_keys for s in spans.segments], device=device)
    key_ends = keys.cumsum(0)
    first_N = (key_ends - keys).repeat_interleave(sizes)
    # The last query of a segment sees all its keys, the one before it all but one, and so on.
    query_ends_N = sizes.cumsum(0).repeat_interleave(sizes)
    position_N = torch.arange(len(first_N), device=device)
    end_N = key_ends.repeat_interleave(sizes) - (query_ends_N - position_N - 1)
    if window is not None:
        first_N = first_N.maximum(end_N - window)
    # The queries that fill the last block see what the last one sees, so it meets no other keys. Blocks
    # after it see nothing.
    padded_N = torch.arange(padded_length(len(first_N)), device=device)
    in_block_N = padded_N < -(-len(first_N) // BLOCK) * BLOCK
    first_N, end_N = (x[padded_N.clamp(max=len(x) - 1)] * in_block_N for x in (first_N, end_N))

    first_I_B, end_I_B = first_N.view(-1, BLOCK), end_N.view(-1, BLOCK)
    start_J = torch.arange(0, padded_length(int(key_ends[-1])), BLOCK, device=device)
    some_I_J = (first_I_B.amin(1)[:, None] < start_J + BLOCK) & (end_I_B.amax(1)[:, None] > start_J)
    all_I_J = (first_I_B.amax(1)[:, None] <= start_J) & (
        end_I_B.amin(1)[:, None] >= start_J + BLOCK
    )

    def sees(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key >= first_N[query]) & (key < end_N[query])

    return BlockMask.from_kv_blocks(
        *_numbers_and_indices(some_I_J & ~all_I_J),
        *_numbers_and_indices(all_I_J),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(first_N), len(start_J) * BLOCK),
    )


def _numbers_and_indices(is_seen_I_J: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries sees, and which: those first, in order."""
    order_I_J = is_seen_I_J.int().argsort(dim=-1, descending=True, stable=True)
    return is_seen_I_J.sum(-1).int()[None, None], order_I_J.int()[None, None]
