# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Packs training rows into micro-batches.

The order is canonical: slot, then sample, then sequence. The same tokens in another split give other
bits, so the split depends only on the rows and on `micro_batch_tokens`. The plan (the number of tokens
of each micro-batch) is recorded in the log.

No micro-batch is larger than `micro_batch_tokens`, unless it is a single sequence. A sequence is never
split, because its likelihood ratio is one number in some objectives, so a longer one is a pass of its
own.

The samples of a group share their prompt, so they are packed as a tree: first the shared context, then
each continuation, which sees the context and itself and counts its positions from the context's end.
Shared tokens are computed and trained once. A group that is larger than a micro-batch is divided between
samples, and each part repeats the context. A *segment* is a packed run of tokens: a context, a
continuation, or a whole sequence. Padding exists inside attention only.

Legend: N packed tokens, B segments, T tokens of the longest segment, U keys that it sees (its
context and itself), R sequences, M actions (tokens the policy chose). An action is predicted from
the hidden state of the token before it, `predictor_M`: the last prompt token predicts the first
action, the last action is a target, and nothing predicts from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from schemas.sampling import Sequence as TokenSequence
from trainer.forward.allowed_tokens import AllowedTokens, allowed_tokens
from trainer.forward.decoder import Attend
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


@dataclass(frozen=True, slots=True)
class Tree:
    """One packed row: examples whose first `num_shared` tokens are the same."""

    num_shared: int
    examples: tuple[Example, ...]

    @property
    def num_tokens(self) -> int:
        own = sum(len(e.sequence.tokens) - self.num_shared for e in self.examples)
        return self.num_shared + own


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
    """indexes into N: the last token of each sequence"""
    num_rows: int
    allowed: AllowedTokens | None = None
    """the tokens that each action was drawn from; None where each was drawn from all"""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)


def build_trees(examples: Sequence[Example], *, share: bool) -> Iterator[Tree]:
    """Group examples into trees. With `share`, successive examples with the same leading context form
    one tree. Otherwise each example is a tree of its own."""
    members: list[Example] = []
    context: tuple[int, ...] = ()
    for example in examples:
        num_context = sum(1 for _ in takewhile(lambda m: m == 0, example.sequence.loss_mask))
        own = example.sequence.tokens[:num_context]
        if members and not (share and own and own == context):
            yield Tree(len(context) if len(members) > 1 else 0, tuple(members))
            members = []
        members.append(example)
        context = own
    if members:
        yield Tree(len(context) if len(members) > 1 else 0, tuple(members))


def split_tree(tree: Tree, *, most: int) -> Iterator[Tree]:
    """Divide a tree between examples into trees of at most `most` tokens, each as large as possible.
    Each repeats the shared tokens. An example that is longer than `most` is a tree of its own."""
    if tree.num_tokens <= most:
        yield tree
        return
    members: list[Example] = []
    total = tree.num_shared
    for example in tree.examples:
        own = len(example.sequence.tokens) - tree.num_shared
        if members and total + own > most:
            yield _subtree(tree, members)
            members, total = [], tree.num_shared
        members.append(example)
        total += own
    yield _subtree(tree, members)


def _subtree(tree: Tree, members: Sequence[Example]) -> Tree:
    """A tree of some of a tree's examples. A single example shares nothing, as in `build_trees`."""
    return Tree(tree.num_shared if len(members) > 1 else 0, tuple(members))


def pack(
    examples: Sequence[Example],
    *,
    micro_batch_tokens: int,
    share: bool,
    splits: bool = True,
    device: torch.device | None = None,
    pads: bool | None = None,
) -> Iterator[MicroBatch]:
    """Examples in canonical order -> micro-batches of at most `micro_batch_tokens` tokens; a single
    longer example is one of its own. Examples without an action have nothing to train and are left out.
    `splits` False: a tree is never divided, and padding is not counted (rules 1, `schemas.learner`).
    `pads`: whether segments are padded into blocks for attention. None: on a CPU, where that is
    fastest, and where rows are not shared, since Transformers' modules need it. Those modules compute
    the padding too, so there it counts as tokens."""
    if pads is None:
        pads = device is None or device.type == "cpu" or not share
    most = micro_batch_tokens
    packing = _Packing(pads)
    for tree in build_trees([e for e in examples if e.num_actions], share=share):
        for part in split_tree(tree, most=most) if splits else (tree,):
            if packing.tokens and packing.size_with(part, padded=splits and not share) > most:
                yield packing.tensors(device)
                packing = _Packing(pads)
            packing.add(part)
    if packing.tokens:
        yield packing.tensors(device)


@dataclass(slots=True)
class _Packing:
    """A micro-batch while it is filled."""

    pads: bool
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
        start, shared = len(self.tokens), tree.num_shared
        if any(e.sequence.constrained and not e.masks for e in tree.examples):
            raise ValueError("a constrained answer needs its token masks: call `with_masks` first")
        self.longest = max(self.longest, tree.num_tokens)
        if shared:
            self._segment(tree.examples[0].sequence.tokens[:shared], 0)
            self.segments.append(Segment(start, start + shared))
        for example in tree.examples:
            tokens, own = example.sequence.tokens, len(self.tokens)
            self._segment(tokens[shared:], shared)
            self.lasts.append(len(self.tokens) - 1)
            self.segments.append(Segment(own, len(self.tokens), start, shared))
            for t in range(1, len(tokens)):
                if example.sequence.loss_mask[t]:
                    before = t - 1
                    at = start + before if before < shared else own + before - shared
                    self.predictors.append(at)
                    self.targets.append(tokens[t])
                    self.behaviour.append(example.sequence.logprobs[t])
                    self.samples.append(example.sample)
                    self.rows.append(self.num_rows)
                    self.masks.append(example.masks.get(t))
            self.num_rows += 1

    def _segment(self, tokens: Sequence[int], position: int) -> None:
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))

    def tensors(self, device: torch.device | None) -> MicroBatch:
        """The micro-batch. Contexts have the length of prompts and continuations that of answers, so
        each kind is padded separately."""
        kinds = (
            [s for s in self.segments if not s.num_context],
            [s for s in self.segments if s.num_context],
        )
        blocks = tuple(_block(kind) for kind in kinds if kind and self.pads)
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


def _block(segments: Sequence[Segment]) -> Block:
    table_B_4 = torch.tensor([[s.start, s.end, s.context_start, s.num_context] for s in segments])
    start_B_1, end_B_1, context_B_1, num_context_B_1 = table_B_4.split(1, dim=1)
    length_B_1 = end_B_1 - start_B_1
    times_T = torch.arange(int(length_B_1.max()))
    keys_U = torch.arange(int((length_B_1 + num_context_B_1).max()))
    zero = torch.tensor(0)
    valid_B_T = times_T < length_B_1
    in_context_B_U = keys_U < num_context_B_1
    own_B_U = start_B_1 + keys_U - num_context_B_1
    known_B_U = keys_U < num_context_B_1 + length_B_1
    visible_B_T_U = keys_U <= (num_context_B_1 + times_T)[:, :, None]
    return Block(
        query_B_T=(start_B_1 + times_T).where(valid_B_T, zero),
        key_B_U=(context_B_1 + keys_U).where(in_context_B_U, own_B_U).where(known_B_U, zero),
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
