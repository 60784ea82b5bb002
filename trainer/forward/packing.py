# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Packs training rows into micro-batches.

The order is canonical: slot, then sample, then sequence. The same tokens in another split give other
bits, so the split depends only on the rows and on `micro_batch_tokens`. The plan (the number of tokens
of each micro-batch) is recorded in the log.

No micro-batch is larger than `micro_batch_tokens`, unless it is a single sequence. A sequence is never
split, because its likelihood ratio is one number in some objectives, so a longer one is a pass of its
own.

The rows of a group begin alike, so they are packed as a tree: a row leaves an earlier one where their
tokens begin to differ (`trainer/forward/prefix_tree.py`). The tokens behind that place see the path to
it and themselves, and count their positions along the path. Shared tokens are computed once. A group
that is larger than a micro-batch is divided between rows, and each part repeats what it shares. A
*segment* is a packed run of tokens between two places where rows leave. Padding exists inside attention
only.

Legend: N packed tokens, B segments, T tokens of the longest segment, U keys that it sees (its
context and itself), R sequences, M actions (tokens the policy chose). An action is predicted from
the hidden state of the token before it, `predictor_M`: the last prompt token predicts the first
action, the last action is a target, and nothing predicts from it. Actions are in the order of rows,
also where several rows predict from one hidden state.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from schemas.sampling import Sequence as TokenSequence
from trainer.forward.allowed_tokens import AllowedTokens, allowed_tokens
from trainer.forward.decoder import Attend
from trainer.forward.prefix_tree import Branch, PrefixTree
from trainer.forward.spans import Segment


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence and the index of the sample it belongs to. `masks` are the token masks of its
    constrained answers, by place (`trainer/grammar/token_masks.py`)."""

    sample: int
    sequence: TokenSequence
    masks: Mapping[int, bytes] = field(default_factory=dict, compare=False)

    @property
    def num_actions(self) -> int:
        """The number of actions. The first token is never one, because no token before it predicts
        it."""
        return sum(self.sequence.loss_mask[1:])

    @property
    def context(self) -> tuple[int, ...]:
        """Its tokens before the first action."""
        tokens, mask = self.sequence.tokens, self.sequence.loss_mask
        return tokens[: mask.index(1)] if 1 in mask else tokens


@dataclass(frozen=True, slots=True)
class Tree:
    """Examples that share what they begin with. Each leaves an earlier one at its branch."""

    examples: tuple[Example, ...]
    branches: tuple[Branch, ...]

    @property
    def num_tokens(self) -> int:
        pairs = zip(self.examples, self.branches, strict=True)
        return sum(len(e.sequence.tokens) - branch.depth for e, branch in pairs)

    @property
    def divisions(self) -> list[list[int]]:
        """For each example, the depths at which its own tokens are divided, because others leave."""
        found: list[set[int]] = [set() for _ in self.examples]
        for branch in self.branches:
            if branch.depth < len(self.examples[branch.row].sequence.tokens):
                found[branch.row].add(branch.depth)
        pairs = zip(found, self.branches, strict=True)
        return [sorted(d for d in depths if d > branch.depth) for depths, branch in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Segments of one kind, padded to the longest of them for attention."""

    query_B_T: torch.Tensor
    """indexes into N; padding repeats token 0"""
    key_B_U: torch.Tensor
    """indexes into N: the tokens of the context, then those of the segment itself"""
    visible_B_T_U: torch.Tensor
    """[b, t, u]: whether t sees u. Every t sees at least one u."""
    valid_B_T: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward and backward pass."""

    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    segments: tuple[Segment, ...]
    """in the order of N"""
    blocks: tuple[Block, ...]
    """empty where attention uses the segments without padding"""
    place_N: torch.Tensor
    """indexes into the B*T outputs of all blocks, one block after the other"""
    predictor_M: torch.Tensor
    """indexes into N"""
    target_M: torch.Tensor
    behaviour_M: torch.Tensor
    """float64: the logprobs that were recorded when sampling"""
    sample_M: torch.Tensor
    row_M: torch.Tensor
    """which of the `num_rows` sequences of this micro-batch"""
    last_R: torch.Tensor
    """indexes into N: the last token of each sequence; empty if tokens were dropped as unread"""
    num_rows: int
    allowed: AllowedTokens | None = None
    """the tokens that each action was drawn from; None where each was drawn from all"""
    has_gradient: bool = True
    """whether the loss of its actions is trained, and not only measured"""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)


def group_into_trees(
    examples: Sequence[Example], *, most: int, share: bool, prefixes: bool
) -> Iterator[Tree]:
    """Group examples into trees of at most `most` tokens. An example that is longer is a tree of its
    own. With `share`, successive examples with the same leading context form one tree. With `prefixes`
    too, the examples of a group share all that they begin with (`trainer/forward/prefix_tree.py`).
    Otherwise each example is a tree of its own."""
    if share and prefixes:
        for group in _groups(examples):
            yield from _prefix_trees(group, most=most)
        return
    for tree in build_trees(examples, share=share):
        yield from split_tree(tree, most=most)


def build_trees(examples: Sequence[Example], *, share: bool) -> Iterator[Tree]:
    """Group examples into trees that share contexts only. With `share`, successive examples with the
    same leading context form one tree. Otherwise each example is a tree of its own."""
    members: list[Example] = []
    for example in examples:
        own = example.context
        if members and not (share and own and own == members[0].context):
            yield _fan(members)
            members = []
        members.append(example)
    if members:
        yield _fan(members)


def _fan(members: Sequence[Example]) -> Tree:
    """The tree of examples with the same leading context. A single example shares nothing."""
    shared = len(members[0].context)
    return Tree(tuple(members), tuple(Branch(0, shared if n else 0) for n in range(len(members))))


def split_tree(tree: Tree, *, most: int) -> Iterator[Tree]:
    """Divide a tree that shares its context between examples into trees of at most `most` tokens, each
    as large as possible. Each repeats the shared tokens."""
    if tree.num_tokens <= most:
        yield tree
        return
    members: list[Example] = []
    total, shared = 0, len(tree.examples[0].context) if len(tree.examples) > 1 else 0
    for example in tree.examples:
        own = len(example.sequence.tokens) - (shared if members else 0)
        if members and total + own > most:
            yield _fan(members)
            members, total, own = [], 0, own + shared
        members.append(example)
        total += own
    yield _fan(members)


def _groups(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Successive rows of one sample, and of samples whose first row has the same leading context."""
    members: list[Example] = []
    for example in examples:
        own = example.context
        is_first = not members or example.sample != members[-1].sample
        if members and is_first and not (own and own == members[0].context):
            yield members
            members = []
        members.append(example)
    if members:
        yield members


def _prefix_trees(group: Sequence[Example], *, most: int) -> Iterator[Tree]:
    """The trees of a group, in order. Rows that share nothing with rows around them are trees of their
    own. A tree of more than `most` tokens is divided between rows, each part as large as possible."""
    (whole,) = _grow(group, most=sys.maxsize)
    # A tree ends where no later row leaves a row before.
    leaves = [b.row if b.depth else n for n, b in enumerate(whole.branches)]
    earliest = [*accumulate(reversed(leaves), min)][::-1]
    starts = [n for n, first in enumerate(earliest) if n == first]
    for start, end in pairwise([*starts, len(group)]):
        moved = (Branch(b.row - start, b.depth) for b in whole.branches[start:end])
        branches = tuple(b if b.depth else Branch(0, 0) for b in moved)
        tree = Tree(tuple(group[start:end]), branches)
        yield from (tree,) if tree.num_tokens <= most else _grow(tree.examples, most=most)


def _grow(examples: Sequence[Example], *, most: int) -> Iterator[Tree]:
    """Examples in order as trees of at most `most` tokens. A longer example is one by itself."""
    found: list[tuple[Example, Branch]] = []
    tree, total = PrefixTree(), 0
    for example in examples:
        tokens, num_context = example.sequence.tokens, len(example.context)
        branch = tree.find(tokens, num_context=num_context)
        if found and total + len(tokens) - branch.depth > most:
            yield Tree(*zip(*found, strict=True))
            found, tree, total, branch = [], PrefixTree(), 0, Branch(0, 0)
        tree.add(tokens, branch, num_context=num_context)
        found.append((example, branch))
        total += len(tokens) - branch.depth
    yield Tree(*zip(*found, strict=True))


def pack(
    examples: Sequence[Example],
    *,
    micro_batch_tokens: int,
    share: bool,
    prefixes: bool = True,
    splits: bool = True,
    drops_unread: bool = False,
    device: torch.device | None = None,
    pads: bool | None = None,
) -> Iterator[MicroBatch]:
    """Examples in canonical order -> micro-batches of at most `micro_batch_tokens` tokens; a single
    longer example is one of its own. Examples without an action have nothing to train and are left out.
    `share` and `prefixes` say what examples share (`group_into_trees`). `splits` False: a tree is never
    divided, and padding is not counted (rules 1, `schemas.learner`). `drops_unread`: tokens that no
    action is predicted from, such as the last one of an answer, are left out where rows are shared.
    They are counted when trees are put into micro-batches.
    `pads`: whether segments are padded into blocks for attention. None: on a CPU, where that is
    fastest, and where rows are not shared, since Transformers' modules need it. Those modules compute
    the padding too, so there it counts as tokens."""
    if pads is None:
        pads = device is None or device.type == "cpu" or not share
    most = micro_batch_tokens
    packing = _Packing(pads, drops_unread and share)
    trained = [e for e in examples if e.num_actions]
    limit = most if splits else sys.maxsize
    for tree in group_into_trees(trained, most=limit, share=share, prefixes=prefixes):
        if packing.tokens and packing.size_with(tree, padded=splits and not share) > most:
            yield packing.tensors(device)
            packing = _Packing(pads, drops_unread and share)
        packing.add(tree)
    if packing.tokens:
        yield packing.tensors(device)


@dataclass(slots=True)
class _Packing:
    """A micro-batch while it is filled."""

    pads: bool
    drops_unread: bool
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    predictors: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    masks: list[bytes | None] = field(default_factory=list)
    num_rows: int = 0
    longest: int = 0

    def size_with(self, tree: Tree, *, padded: bool) -> int:
        """The tokens of the pass if this tree is added. `padded`: all rows are as long as the
        longest."""
        if not padded:
            return len(self.tokens) + tree.num_tokens
        return (self.num_rows + len(tree.examples)) * max(tree.num_tokens, self.longest)

    def add(self, tree: Tree) -> None:
        if any(e.sequence.constrained and not e.masks for e in tree.examples):
            raise ValueError("a constrained answer needs its token masks: call `with_masks` first")
        self.longest = max(self.longest, tree.num_tokens)
        paths: list[tuple[range, ...]] = []
        for example, branch, divisions in zip(
            tree.examples, tree.branches, tree.divisions, strict=True
        ):
            tokens = example.sequence.tokens
            path = _begin(paths[branch.row], branch.depth) if branch.depth else ()
            for start, end in pairwise((branch.depth, *divisions, len(tokens))):
                path = self._segment(tokens[start:end], start, path)
            paths.append(path)
            place = [*chain.from_iterable(path)]
            self.lasts.append(place[-1])
            for t in range(1, len(tokens)):
                if example.sequence.loss_mask[t]:
                    before = t - 1
                    self.predictors.append(place[before])
                    self.targets.append(tokens[t])
                    self.behaviour.append(example.sequence.logprobs[t])
                    self.samples.append(example.sample)
                    self.rows.append(self.num_rows)
                    self.masks.append(example.masks.get(t))
            self.num_rows += 1

    def _segment(
        self, tokens: Sequence[int], position: int, context: tuple[range, ...]
    ) -> tuple[range, ...]:
        """Append tokens that continue this path. Returns the path through them."""
        if not tokens:
            return context
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        self.segments.append(Segment(start, end, context))
        return (*context, range(start, end))

    def _drop_unread(self) -> None:
        """Drop the tokens of each segment behind the last one that an action is predicted from, or that
        another segment sees."""
        read = [False] * len(self.tokens)
        for n in (*self.predictors, *(part[-1] for s in self.segments for part in s.context)):
            read[n] = True
        segments = [
            replace(s, end=max((n + 1 for n in range(s.start, s.end) if read[n]), default=s.start))
            for s in self.segments
        ]
        kept = [n for s in segments for n in range(s.start, s.end)]
        moved = {n: place for place, n in enumerate(kept)}

        def move(part: range) -> range:
            return range(moved[part[0]], moved[part[-1]] + 1)

        self.segments = [
            Segment(moved[s.start], moved[s.end - 1] + 1, tuple(map(move, s.context)))
            for s in segments
            if s.num_tokens
        ]
        self.tokens = [self.tokens[n] for n in kept]
        self.positions = [self.positions[n] for n in kept]
        self.predictors = [moved[n] for n in self.predictors]
        self.lasts = []

    def tensors(self, device: torch.device | None) -> MicroBatch:
        """The micro-batch."""
        if self.drops_unread:
            self._drop_unread()
        blocks = tuple(_block(kind) for kind in _alike(self.segments)) if self.pads else ()
        place_N = torch.zeros(len(self.tokens), dtype=torch.long)
        first = 0
        for block in blocks:
            spots = block.valid_B_T.flatten().nonzero()[:, 0]
            place_N[block.query_B_T[block.valid_B_T]] = first + spots
            first += block.valid_B_T.numel()
        on_device = tuple(
            Block(*(t.to(device) for t in (b.query_B_T, b.key_B_U, b.visible_B_T_U, b.valid_B_T)))
            for b in blocks
        )
        return MicroBatch(
            tokens_N=torch.tensor(self.tokens, device=device),
            positions_N=torch.tensor(self.positions, device=device),
            segments=tuple(self.segments),
            blocks=on_device,
            place_N=place_N.to(device),
            predictor_M=torch.tensor(self.predictors, device=device),
            target_M=torch.tensor(self.targets, device=device),
            behaviour_M=torch.tensor(self.behaviour, dtype=torch.float64, device=device),
            sample_M=torch.tensor(self.samples, device=device),
            row_M=torch.tensor(self.rows, device=device),
            last_R=torch.tensor(self.lasts, device=device),
            num_rows=self.num_rows,
            allowed=allowed_tokens(self.masks, device=device),
        )


def _begin(path: tuple[range, ...], depth: int) -> tuple[range, ...]:
    """The first `depth` tokens of a path."""
    found: list[range] = []
    for part in path:
        if depth > 0:
            found.append(part[:depth])
        depth -= len(part)
    return tuple(found)


def _alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """The segments that are padded together. Contexts have the length of prompts and continuations that
    of answers, so each kind is a block. In a tree of more levels segments differ more, so a block has
    those of about the same size."""
    is_deep = any(len(s.context) > 1 for s in segments)
    kinds: dict[tuple[int, ...], list[Segment]] = {}
    for s in segments:
        sizes = (s.num_tokens.bit_length(), s.num_keys.bit_length()) if is_deep else ()
        kinds.setdefault((len(s.context) > 0, *sizes), []).append(s)
    return [kinds[key] for key in sorted(kinds)]


def _block(segments: Sequence[Segment]) -> Block:
    table_B_3 = torch.tensor([[s.start, s.end, s.num_context] for s in segments])
    start_B_1, end_B_1, num_context_B_1 = table_B_3.split(1, dim=1)
    length_B_1 = end_B_1 - start_B_1
    times_T = torch.arange(int(length_B_1.max()))
    keys_U = torch.arange(int((length_B_1 + num_context_B_1).max()))
    zero = torch.tensor(0)
    valid_B_T = times_T < length_B_1
    known_B_U = keys_U < num_context_B_1 + length_B_1
    visible_B_T_U = keys_U <= (num_context_B_1 + times_T)[:, :, None]
    keys = [torch.cat([torch.arange(r.start, r.stop) for r in s.keys]) for s in segments]
    return Block(
        query_B_T=(start_B_1 + times_T).where(valid_B_T, zero),
        key_B_U=pad_sequence(keys, batch_first=True),
        visible_B_T_U=visible_B_T_U & (known_B_U[:, None, :] | ~valid_B_T[:, :, None]),
        valid_B_T=valid_B_T,
    )


def packed_attend(
    micro: MicroBatch, *, kv_heads: int, windows: Sequence[int | None] = ()
) -> Attend:
    """Attention over the packed segments: pad, attend under the mask, remove the padding. `windows`:
    how many tokens a token sees in each layer."""
    within = {window: _within(micro, window) for window in dict.fromkeys((None, *windows))}

    def attend(
        layer: int, q_N_A_D: torch.Tensor, k_N_K_D: torch.Tensor, v_N_K_D: torch.Tensor
    ) -> torch.Tensor:
        outputs = [
            _attend_block(block, q_N_A_D, k_N_K_D, v_N_K_D, kv_heads=kv_heads)
            for block in within[windows[layer] if windows else None]
        ]
        return torch.cat(outputs).index_select(0, micro.place_N)

    return attend


def _within(micro: MicroBatch, window: int | None) -> tuple[Block, ...]:
    """The blocks, in which each token sees at most the last `window` tokens. Padding repeats the token
    at position 0, so it still sees a token."""
    if window is None:
        return micro.blocks
    blocks = []
    for block in micro.blocks:
        at_B_T, key_at_B_U = (micro.positions_N[i] for i in (block.query_B_T, block.key_B_U))
        near_B_T_U = key_at_B_U[:, None, :] > at_B_T[:, :, None] - window
        blocks.append(replace(block, visible_B_T_U=block.visible_B_T_U & near_B_T_U))
    return tuple(blocks)


def _attend_block(
    block: Block,
    q_N_A_D: torch.Tensor,
    k_N_K_D: torch.Tensor,
    v_N_K_D: torch.Tensor,
    *,
    kv_heads: int,
) -> torch.Tensor:
    """The attention outputs (B*T, A*D) of one block."""
    rows, length, num_keys = block.visible_B_T_U.shape
    _, heads, size = q_N_A_D.shape
    groups = heads // kv_heads
    q = (q_N_A_D * size**-0.5).index_select(0, block.query_B_T.flatten())
    q = q.view(rows, length, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(rows * kv_heads, groups * length, size)
    k, v = (
        x.index_select(0, block.key_B_U.flatten())
        .view(rows, num_keys, kv_heads, size)
        .transpose(1, 2)
        .reshape(rows * kv_heads, num_keys, size)
        for x in (k_N_K_D, v_N_K_D)
    )
    unseen = torch.zeros(block.visible_B_T_U.shape, dtype=q.dtype, device=q.device)
    unseen = unseen.masked_fill(~block.visible_B_T_U, float("-inf"))[:, None, None]
    scores = (q @ k.transpose(1, 2)).view(rows, kv_heads, groups, length, num_keys)
    weights = (scores + unseen).softmax(dim=-1)
    out = weights.view(rows * kv_heads, groups * length, num_keys) @ v
    out = out.view(rows, kv_heads, groups, length, size).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * length, heads * size)
