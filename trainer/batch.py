# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Training rows -> packed micro-batches.

Order is canonical (slot, then sample, then sequence) and the split is a function of the rows and
`micro_batch_tokens` alone, because the same tokens split otherwise give other bits. The plan (the
token count of each micro-batch) goes into the log.

The samples of a group share their prompt, so they are packed as a tree: the shared context once,
then each continuation, which sees the context and itself and counts its positions from the
context's end. Shared tokens are computed and trained once. Padding exists inside attention only.

Legend: N packed tokens, B rows, T the longest row, M actions (tokens the policy chose). An action
is predicted from the hidden state of the token before it, `predictor_M`: the last prompt token
predicts the first action, the last action is a target, and nothing predicts from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from schemas.sampling import Sequence as TokenSequence
from trainer.decoder import Attend

SHARED_ROW_TOKENS = 512
"""A tree grows no longer than this: attention costs its square, sharing saves its context once."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence and the index of the sample it belongs to."""

    sample: int
    sequence: TokenSequence

    @property
    def num_actions(self) -> int:
        """A first token has nothing before it that could predict it."""
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
class MicroBatch:
    """Tensors of one forward and backward pass."""

    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    gather_B_T: torch.Tensor
    """index into N; padding repeats token 0"""
    place_N: torch.Tensor
    """index into B*T"""
    valid_B_T: torch.Tensor
    visible_B_T_T: torch.Tensor
    """[b, t, u]: t may look at u; padding looks at itself"""
    predictor_M: torch.Tensor
    """index into N"""
    target_M: torch.Tensor
    behaviour_M: torch.Tensor
    """float64: logprobs as recorded when sampling"""
    sample_M: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)


def trees(examples: Sequence[Example], *, share: bool) -> Iterator[Tree]:
    """Neighbours with the same leading context form a tree, unless `share` is off."""
    members: list[Example] = []
    size = 0
    context: tuple[int, ...] = ()
    for example in examples:
        tokens, mask = example.sequence.tokens, example.sequence.loss_mask
        own = tokens[: sum(1 for _ in takewhile(lambda m: m == 0, mask))]
        grown = size + len(tokens) - len(own)
        if members and share and own and own == context and grown <= SHARED_ROW_TOKENS:
            members.append(example)
            size = grown
            continue
        if members:
            yield Tree(len(context) if len(members) > 1 else 0, tuple(members))
        members, size, context = [example], len(tokens), own
    if members:
        yield Tree(len(context) if len(members) > 1 else 0, tuple(members))


def pack(
    examples: Sequence[Example],
    *,
    micro_batch_tokens: int,
    share: bool,
    device: torch.device | None = None,
) -> Iterator[MicroBatch]:
    """Examples in canonical order -> micro-batches of at most `micro_batch_tokens` tokens (a single
    longer row stands alone). Examples without an action have nothing to train and are left out."""
    rows: list[Tree] = []
    size = 0
    for tree in trees([e for e in examples if e.num_actions], share=share):
        if rows and size + tree.num_tokens > micro_batch_tokens:
            yield _tensors(rows, device)
            rows, size = [], 0
        rows.append(tree)
        size += tree.num_tokens
    if rows:
        yield _tensors(rows, device)


@dataclass(slots=True)
class _Columns:
    tokens: list[int]
    positions: list[int]
    branches: list[int]
    predictors: list[int]
    targets: list[int]
    behaviour: list[float]
    samples: list[int]


def _append_tree(columns: _Columns, tree: Tree) -> None:
    start = len(columns.tokens)
    shared = tree.examples[0].sequence.tokens[: tree.num_shared]
    columns.tokens += shared
    columns.positions += range(len(shared))
    columns.branches += [0] * len(shared)
    for branch, example in enumerate(tree.examples, start=1):
        sequence = example.sequence
        own = len(columns.tokens) - tree.num_shared
        columns.tokens += sequence.tokens[tree.num_shared :]
        columns.positions += range(tree.num_shared, len(sequence.tokens))
        columns.branches += [branch] * (len(sequence.tokens) - tree.num_shared)
        for t in range(1, len(sequence.tokens)):
            if not sequence.loss_mask[t]:
                continue
            before = t - 1
            base = start if before < tree.num_shared else own
            columns.predictors.append(base + before)
            columns.targets.append(sequence.tokens[t])
            columns.behaviour.append(sequence.logprobs[t])
            columns.samples.append(example.sample)


def _tensors(rows: Sequence[Tree], device: torch.device | None) -> MicroBatch:
    columns = _Columns([], [], [], [], [], [], [])
    for tree in rows:
        _append_tree(columns, tree)
    lengths_B = torch.tensor([tree.num_tokens for tree in rows])
    starts_B = lengths_B.cumsum(0) - lengths_B
    times_T = torch.arange(int(lengths_B.max()))
    valid_B_T = times_T < lengths_B[:, None]
    gather_B_T = (starts_B[:, None] + times_T).where(valid_B_T, torch.tensor(0))
    branch_B_T = torch.tensor(columns.branches)[gather_B_T]
    same = (branch_B_T[:, None, :] == branch_B_T[:, :, None]) | (branch_B_T[:, None, :] == 0)
    causal = times_T[:, None] >= times_T
    inside = valid_B_T[:, None, :] & valid_B_T[:, :, None]
    itself = torch.eye(len(times_T), dtype=torch.bool)
    place_N = valid_B_T.flatten().nonzero().flatten()
    parts = (
        torch.tensor(columns.tokens),
        torch.tensor(columns.positions),
        gather_B_T,
        place_N,
        valid_B_T,
        (same & causal & inside) | itself,
        torch.tensor(columns.predictors),
        torch.tensor(columns.targets),
        torch.tensor(columns.behaviour, dtype=torch.float64),
        torch.tensor(columns.samples),
    )
    return MicroBatch(*(part.to(device) for part in parts))


def packed_attend(micro: MicroBatch, *, kv_heads: int) -> Attend:
    """Attention over the packed rows: pad, attend under the tree mask, remove the padding."""
    rows, length = micro.gather_B_T.shape
    hidden = ~micro.visible_B_T_T[:, None, None]

    def padded(x_N_A_D: torch.Tensor) -> torch.Tensor:
        return x_N_A_D.index_select(0, micro.gather_B_T.flatten()).view(
            rows, length, *x_N_A_D.shape[1:]
        )

    def attend(
        layer: int, q_N_A_D: torch.Tensor, k_N_K_D: torch.Tensor, v_N_K_D: torch.Tensor
    ) -> torch.Tensor:
        _, heads, size = q_N_A_D.shape
        groups = heads // kv_heads
        q = padded(q_N_A_D * size**-0.5).view(rows, length, kv_heads, groups, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, groups * length, size)
        k, v = padded(k_N_K_D).transpose(1, 2), padded(v_N_K_D).transpose(1, 2)
        scores = (q @ k.transpose(-1, -2)).view(rows, kv_heads, groups, length, length)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out = weights.view(rows, kv_heads, groups * length, length) @ v
        out = out.view(rows, heads, length, size).transpose(1, 2)
        return out.reshape(rows * length, heads * size).index_select(0, micro.place_N)

    return attend
