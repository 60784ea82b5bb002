# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""The segments of packed rows, and which keys each of their tokens sees.

Legend: N packed tokens, S segments, U keys of all segments one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens from start to end (exclusive) of N. They see the tokens of `context`, which are parts
    of the segments on the path to them, and the segment's own tokens up to themselves."""

    start: int
    end: int
    context: tuple[range, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_context(self) -> int:
        return sum(map(len, self.context))

    @property
    def keys(self) -> tuple[range, ...]:
        """The tokens that its last token sees, in order."""
        return (*self.context, range(self.start, self.end))

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
        keys += chain.from_iterable(segment.keys)
        ends.append(len(keys))
    shared = any(segment.context for segment in segments)
    return Spans(
        segments=tuple(segments),
        query_ends_S=torch.tensor(starts, dtype=torch.int32, device=device),
        key_ends_S=torch.tensor(ends, dtype=torch.int32, device=device),
        key_U=torch.tensor(keys, device=device) if shared else None,
        longest_query=max(s.num_tokens for s in segments),
        longest_keys=max(s.num_keys for s in segments),
    )
