"""Where the rows of a group leave one another, so that a common beginning is computed once.

A model that reasons often answers several turns with a row of its own for each turn, because its
template drops the reasoning of earlier turns. Each row begins like the row before it, up to where that
one begins to reason. So rows are added to a tree one after the other. A row *leaves* an earlier row at
the depth up to which their tokens are equal, and only the tokens behind it are its own.

Each place where a row leaves another divides that one into two segments, so a few more equal tokens are
not worth a place of their own. A row that leaves less than LEAST_SHARED tokens behind a place that
there is leaves at that place. Such places are the beginning of the rows, the end of a row's leading
context, and those where rows have left before. So rows that share their context and little more leave
at its end, as under rules 5 (`schemas.learner`).

What a row learns plays no part. Equal tokens with equal tokens before them have equal hidden states, and
each row still has its own actions, with its own logprobs, advantages and token masks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

LEAST_SHARED = 16
"""How many tokens more two rows must have in common to get a place where they leave each other."""
CHUNK = 256


class Branch(NamedTuple):
    """A row has its first `depth` tokens from row `row` of its tree. With depth 0 all are its own."""

    row: int
    depth: int


class PrefixTree:
    """Rows of tokens, and the places where they leave one another. Rows are numbered as they are
    added."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._branches: list[Branch] = []
        self._places: list[list[int]] = []
        """of each row, in order: the depths at which its own tokens begin, or another row may leave"""
        self._by_context: dict[tuple[int, ...], int] = {}
        self._by_blocks: dict[int, int] = {}
        """the first row with these leading blocks of LEAST_SHARED tokens, by their hash"""

    def find(self, tokens: tuple[int, ...], *, num_context: int) -> Branch:
        """Where a row would leave the rows of the tree. `num_context`: the tokens of the row before its
        first action. The depth is at most their number if they are all that the row shares."""
        alike = self._rows_like(tokens, num_context)
        depth, row = max(((_num_equal(tokens, self._rows[n]), -n) for n in alike), default=(0, 0))
        return self._leave(-row, depth)

    def add(self, tokens: tuple[int, ...], branch: Branch, *, num_context: int) -> None:
        """Add a row that leaves the tree there."""
        number = len(self._rows)
        if branch.depth and branch.depth not in (places := self._places[branch.row]):
            places.insert(bisect_right(places, branch.depth), branch.depth)
        own = {branch.depth, max(branch.depth, num_context)}
        self._rows.append(tokens)
        self._branches.append(branch)
        self._places.append(sorted(own))
        if num_context:
            self._by_context.setdefault(tokens[:num_context], number)
        for key in _block_keys(tokens):
            self._by_blocks.setdefault(key, number)

    def _rows_like(self, tokens: tuple[int, ...], num_context: int) -> set[int]:
        """The first row with the same leading context, and the first with most of the same blocks."""
        found = {self._by_context.get(tokens[:num_context])} if num_context else set()
        deepest = None
        for key in _block_keys(tokens):
            if (row := self._by_blocks.get(key)) is None:
                break
            deepest = row
        return {row for row in (*found, deepest) if row is not None}

    def _leave(self, row: int, depth: int) -> Branch:
        """The place for a row that has `depth` tokens in common with row `row`. That is a place on the
        row whose own tokens end there."""
        while depth:
            if depth > (of := self._branches[row]).depth:
                places = self._places[row]
                before = places[bisect_right(places, depth) - 1]
                if depth - before < LEAST_SHARED:
                    depth = before
            if depth > of.depth:
                return Branch(row, depth)
            row = of.row
        return Branch(0, 0)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    most = min(len(one), len(other))
    for start in range(0, most, CHUNK):
        mine, theirs = one[start : start + CHUNK], other[start : start + CHUNK]
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            return start + next((n for n, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return most


def _block_keys(tokens: tuple[int, ...]) -> list[int]:
    """A hash of the leading blocks of a row, for each number of them. Equal blocks have equal hashes."""
    keys, key = [], 0
    for end in range(LEAST_SHARED, len(tokens) + 1, LEAST_SHARED):
        key = hash((key, tokens[end - LEAST_SHARED : end]))
        keys.append(key)
    return keys
