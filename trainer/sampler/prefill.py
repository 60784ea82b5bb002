# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Reads each prompt once, for all samples of that prompt.

Through torch several prompts are read in one pass. The shape of the pass depends only on the length of
each prompt. Short prompts are padded to a multiple of 32 and share a pass with a fixed number of rows
(filled up with dummies), and long prompts are read alone. So a prompt's cache and first logits have the
same bits whatever other prompts are read with it, which `has_independent_prompts` checks on this
machine. In C (`trainer/native/decode.py`) this holds by construction. `trainer/sampler/prompt_tree.py`
leaves out the fillings, and the tokens that prompts have in common.

Legend: R rows, P tokens of a prompt, T its padded length, K key heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.forward.decoder import Attend
from trainer.native.interface import KeyValueCache
from trainer.sampler.decode_model import DecodeModel

PASS_TOKENS = 256
ROUND_TOKENS = 32

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt after it was read: the logits after its last token, and a cache."""

    logits_V: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.logits_V.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class TorchPrompt(Prompt):
    """Keys and values are (layers, K, P, D)."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.logits_V.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class NativePrompt(Prompt):
    """Read in C. The rows that draw after it read this cache."""

    cache: KeyValueCache

    @property
    def num_bytes(self) -> int:
        return self.cache.data.nbytes + self.logits_V.nbytes


def pass_shape(num_tokens: int) -> tuple[int, int]:
    """(rows, padded length) of the pass that reads a prompt of this length."""
    if num_tokens > PASS_TOKENS // 2:
        return 1, num_tokens
    padded = -(-num_tokens // ROUND_TOKENS) * ROUND_TOKENS
    return PASS_TOKENS // padded, padded


@torch.inference_mode()
def read_prompts(
    model: DecodeModel, prompts: Sequence[Ids], *, shape: tuple[int, int]
) -> list[TorchPrompt]:
    """Run up to `shape[0]` prompts through the model in one pass."""
    rows, length = shape
    device = model.embedding.device
    padded = [(*ids, *(0,) * (length - len(ids))) for ids in prompts]
    padded += [(0,) * length] * (rows - len(prompts))
    tokens_N = torch.tensor(padded, device=device).flatten()
    positions_N = torch.arange(length, device=device).repeat(rows)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    windows = model.decoder.windows
    unseen = {w: unseen_tokens(length, window=w, device=device) for w in set(windows)}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.view(rows, length, *x.shape[1:]).transpose(1, 2).contiguous() for x in (k, v))
        kept.append((k, v))
        return attend_in_pass(q, k, v, unseen[windows[layer]])

    look: Attend = attend
    hidden_N_H = model.hidden_states(tokens_N, positions_N, look)
    ends = [len(ids) - 1 for ids in prompts] + [0] * (rows - len(prompts))
    last_R = torch.tensor(ends, device=device) + positions_N.new_tensor(range(rows)) * length
    logits_R_V = model.logits(hidden_N_H.index_select(0, last_R))
    return [
        TorchPrompt(
            logits_R_V[i].clone(),
            torch.stack([k[i, :, : len(ids)] for k, _ in kept]),
            torch.stack([v[i, :, : len(ids)] for _, v in kept]),
        )
        for i, ids in enumerate(prompts)
    ]


def unseen_tokens(length: int, *, window: int | None = None, device: torch.device) -> torch.Tensor:
    """Which tokens each token does not see, (T, T): those after it, and those before its window."""
    all_T_T = torch.ones(length, length, dtype=torch.bool, device=device)
    return all_T_T.triu(1) if window is None else all_T_T.triu(1) | all_T_T.tril(-window)


def attend_in_pass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unseen_T_T: torch.Tensor
) -> torch.Tensor:
    """The attention of a pass, (R T, A D). q is (R T, A, D), and k and v are (R, K, T, D)."""
    rows, kv_heads, length, size = k.shape
    q = (q * size**-0.5).view(rows, length, kv_heads, -1, size)
    q = q.permute(0, 2, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)[:, :, None]).masked_fill(unseen_T_T, float("-inf"))
    out = scores.softmax(dim=-1) @ v[:, :, None]
    return out.permute(0, 3, 1, 2, 4).reshape(rows * length, -1)


def has_independent_prompts(model: DecodeModel, shape: tuple[int, int]) -> bool:
    """Whether a prompt's bits depend neither on its row nor on the others in the pass."""
    rows, length = shape
    size = len(model.embedding)
    prompts = [
        tuple((7 * r + 3 * t + 1) % size for t in range(max(1, length - 3 * r)))
        for r in range(rows)
    ]
    first = read_prompts(model, prompts, shape=shape)
    moved = read_prompts(model, prompts[::-1], shape=shape)[::-1]
    alone = read_prompts(model, prompts[-1:], shape=shape)
    return have_equal_bits([*first, first[-1]], [*moved, alone[0]])


def have_equal_bits(some: Sequence[TorchPrompt], others: Sequence[TorchPrompt]) -> bool:
    """Whether these are the same caches and logits."""
    return all(
        torch.equal(a.keys, b.keys)
        and torch.equal(a.values, b.values)
        and torch.equal(a.logits_V, b.logits_V)
        for a, b in zip(some, others, strict=True)
    )
