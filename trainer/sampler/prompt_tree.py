"""Reads prompts that begin alike, each token once, with the bits of `trainer/sampler/prefill.py`.

The prompts of a task share their chat template and often an instruction. A token's keys and values
depend only on the tokens before it, so prompts form a tree, and a node of it is computed once for all
prompts that pass through it. Nodes of prompts that were read before are not computed at all.

Only the linear layers and norms run over nodes. Products in C compute each row with the bits of a whole
pass (`trainer/native/product.py`). Attention is a small part of the work, and runs in the shapes of the
whole pass.

Legend: N nodes that are computed, K key heads, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.sampler.decode_model import FusedModel
from trainer.sampler.prefill import (
    Ids,
    TorchPrompt,
    attend_in_pass,
    have_equal_bits,
    read_prompts,
    unseen_tokens,
)

ROUND_NODES = 8
"""Nodes are filled up to a multiple of this number, so that threads divide them into whole rows."""
MOST_PASSES = 8
"""How many passes are read together at most, because their attention needs memory."""


def read_tree(
    model: FusedModel,
    prompts: Sequence[Ids],
    *,
    shape: tuple[int, int],
    held: Mapping[Ids, TorchPrompt],
) -> dict[Ids, TorchPrompt]:
    """The prompts, with the bits of passes of this shape. `held` are prompts of the same version and
    shape, which are not read again."""
    found: dict[Ids, TorchPrompt] = {}
    size = MOST_PASSES * shape[0]
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        tree = prompt_tree(model, part, {**held, **found})
        found |= zip(part, _read(model, tree, shape=shape), strict=True)
    return found


def has_exact_tree(model: FusedModel, shape: tuple[int, int]) -> bool:
    """Whether prompts that are read as a tree have the bits of a whole pass on this machine, in another
    order, and where the beginning of one was read before."""
    rows, length = shape
    size = len(model.embedding)
    stem = tuple((3 * t + 1) % size for t in range(length // 2))
    prompts = [
        (*stem, *((7 * r + 5 * t + 2) % size for t in range(length // 2 - r % 4)))
        for r in range(rows)
    ]
    first = read_prompts(model, prompts, shape=shape)
    moved = read_tree(model, prompts[::-1], shape=shape, held={})
    after = read_tree(model, prompts[-1:], shape=shape, held={prompts[0]: first[0]})
    found = [*(moved[ids] for ids in prompts), after[prompts[-1]]]
    return have_equal_bits([*first, first[-1]], found)


@dataclass(frozen=True, slots=True, eq=False)
class PromptTree:
    """The nodes of some prompts, each a token after the tokens before it. They are numbered: first the
    `num_held` nodes that were read before, with their `keys` and `values` (layers, nodes, K, D), then
    those that are computed, of these `tokens` and `positions`."""

    paths: tuple[tuple[int, ...], ...]
    """The nodes of each prompt"""
    keys: torch.Tensor
    values: torch.Tensor
    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def num_held(self) -> int:
        return self.keys.shape[1]


def prompt_tree(
    model: FusedModel, prompts: Sequence[Ids], held: Mapping[Ids, TorchPrompt]
) -> PromptTree:
    """The tree of some prompts, after those that are `held`. The last token of each prompt is computed
    in any case, because its logits are wanted."""
    children: dict[tuple[int, int], int] = {}

    def path_of(ids: Ids) -> list[int]:
        path = [-1]
        for token in ids:
            path.append(children.setdefault((path[-1], token), len(children)))
        return path[1:]

    sources = {
        node: (prompt, position)
        for ids, prompt in held.items()
        for position, node in enumerate(path_of(ids))
    }
    paths = [path_of(ids) for ids in prompts]
    token_of = {node: token for (_, token), node in children.items()}
    ends = {path[-1] for path in paths}
    place_of = {node: place for path in paths for place, node in enumerate(path)}
    known = [node for node in place_of if node in sources and node not in ends]
    new = [node for node in place_of if node not in sources or node in ends]
    number = {node: i for i, node in enumerate((*known, *new))}
    decoder = model.decoder
    none = model.embedding.new_empty(decoder.num_layers, 0, decoder.kv_heads, decoder.head_dim)
    found = [sources[node] for node in known]
    keys = torch.cat([none, *(prompt.keys[:, None, :, at] for prompt, at in found)], dim=1)
    values = torch.cat([none, *(prompt.values[:, None, :, at] for prompt, at in found)], dim=1)
    return PromptTree(
        paths=tuple(tuple(number[node] for node in path) for path in paths),
        keys=keys,
        values=values,
        tokens=tuple(token_of[node] for node in new),
        positions=tuple(place_of[node] for node in new),
    )


@torch.inference_mode()
def _read(model: FusedModel, tree: PromptTree, *, shape: tuple[int, int]) -> list[TorchPrompt]:
    rows, length = shape
    device, num = model.embedding.device, len(tree.tokens)
    spare = (0,) * (-num % ROUND_NODES)
    nodes = _nodes(tree, shape=shape).to(device)
    asking = (nodes - tree.num_held).clamp_(min=0)
    places = _places(tree, length=length, size=num + len(spare)).to(device)
    unseen_T_T = unseen_tokens(length, device=device)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        held = (tree.keys[layer], tree.values[layer])
        kept.append((torch.cat([held[0], k[:num]]), torch.cat([held[1], v[:num]])))
        found = []
        for asks, here in zip(asking, nodes, strict=True):
            k, v = (x[here].view(rows, length, *x.shape[1:]).transpose(1, 2) for x in kept[-1])
            found.append(attend_in_pass(q[asks], k.contiguous(), v.contiguous(), unseen_T_T))
        return torch.cat(found)[places]

    hidden_N_H = model.hidden_states(
        torch.tensor(tree.tokens + spare, device=device),
        torch.tensor(tree.positions + spare, device=device),
        attend,
        rows=rows * length,
    )
    keys, values = (torch.stack(of) for of in zip(*kept, strict=True))
    prompts: list[TorchPrompt] = []
    for start in range(0, len(tree.paths), rows):
        paths = tree.paths[start : start + rows]
        ends = [path[-1] - tree.num_held for path in paths]
        ends += ends[:1] * (rows - len(ends))
        logits_R_V = model.logits(hidden_N_H[torch.tensor(ends, device=device)])
        for logits_V, path in zip(logits_R_V, paths, strict=False):
            at = torch.tensor(path, device=device)
            own = (x[:, at].transpose(1, 2).contiguous() for x in (keys, values))
            prompts.append(TorchPrompt(logits_V.clone(), *own))
    return prompts


def _nodes(tree: PromptTree, *, shape: tuple[int, int]) -> torch.Tensor:
    """The node in each place of the passes, (passes, R T). Fillings come after the tokens of a prompt,
    which do not see them, so any node will do."""
    rows, length = shape
    filled = [(*path, *(0,) * (length - len(path))) for path in tree.paths]
    filled += [(0,) * length] * (-len(filled) % rows)
    return torch.tensor(filled).view(-1, rows * length)


def _places(tree: PromptTree, *, length: int, size: int) -> torch.Tensor:
    """A place of each node that is computed, filled up to this size. Where prompts share a node, its
    attention is the same in each of its places."""
    found = [0] * size
    for row, path in enumerate(tree.paths):
        for position, node in enumerate(path):
            if node >= tree.num_held:
                found[node - tree.num_held] = row * length + position
    return torch.tensor(found)
