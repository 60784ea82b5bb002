# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Reads each prompt once, for all samples of that prompt.

Through torch several prompts are read in one pass. The shape of the pass depends only on the length of
each prompt. Short prompts are padded to a multiple of 32 and share a pass with a fixed number of rows
(filled up with dummies), and long prompts are read alone. So a prompt's cache and first logits have the
same bits whatever other prompts are read with it, which `has_independent_prompts` checks on this
machine. In C (`trainer/native/decode.py`) this holds by construction. The last prompts are kept, so
samples of a group that arrive one by one share them too.

Legend: R rows, P tokens of a prompt, T its padded length, K key heads, D head size.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.forward.decoder import Attend, Decoder
from trainer.native.interface import KeyValueCache
from trainer.sampler.decode_model import DecodeModel

BUDGET_BYTES = 64 << 20
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
    decoder, device = model.decoder, model.embedding.device
    padded = [(*ids, *(0,) * (length - len(ids))) for ids in prompts]
    padded += [(0,) * length] * (rows - len(prompts))
    tokens_N = torch.tensor(padded, device=device).flatten()
    positions_N = torch.arange(length, device=device).repeat(rows)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    all_T_T = torch.ones(length, length, dtype=torch.bool, device=device)
    unseen = {
        window: all_T_T.triu(1) if window is None else all_T_T.triu(1) | all_T_T.tril(-window)
        for window in dict.fromkeys(decoder.windows)
    }

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.view(rows, length, *x.shape[1:]).transpose(1, 2).contiguous() for x in (k, v))
        kept.append((k, v))
        size = q.shape[-1]
        q = (q * size**-0.5).view(rows, length, decoder.kv_heads, decoder.groups, size)
        q = q.permute(0, 2, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)[:, :, None]
        scores = scores.masked_fill(unseen[decoder.windows[layer]], float("-inf"))
        out = scores.softmax(dim=-1) @ v[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(rows * length, -1)

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
    pairs = [*zip(first, moved, strict=True), (first[-1], alone[0])]
    return all(
        torch.equal(a.keys, b.keys)
        and torch.equal(a.values, b.values)
        and torch.equal(a.logits_V, b.logits_V)
        for a, b in pairs
    )


class PromptCache:
    """A cache of the prompts that were read last, by version and ids."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._held: OrderedDict[tuple[str, bool, Ids], Prompt] = OrderedDict()
        self._num_bytes = 0
        self._trusted: dict[tuple[Decoder, tuple[int, int]], bool] = {}

    def get(
        self, version: str, model: DecodeModel, prompts: Sequence[Ids], *, fixed: bool
    ) -> dict[Ids, Prompt]:
        """The prompts, by their ids. Those that are not in the cache are read now. `fixed` means that
        they are for batches of fixed shapes, which run through torch."""
        keys = {ids: (version, fixed, ids) for ids in prompts}
        found = {ids: self._held[key] for ids, key in keys.items() if key in self._held}
        missing = [ids for ids in keys if ids not in found]
        if not fixed and model.native_decoder is not None:
            read = zip(missing, model.native_decoder.read(missing), strict=True)
            found |= {ids: NativePrompt(logits_V, cache) for ids, (cache, logits_V) in read}
        else:
            found |= self._read_through_torch(model, missing)
        for ids, prompt in found.items():
            self._hold(keys[ids], prompt)
        return found

    def _read_through_torch(self, model: DecodeModel, missing: Sequence[Ids]) -> dict[Ids, Prompt]:
        found: dict[Ids, Prompt] = {}
        for shape in dict.fromkeys(pass_shape(len(ids)) for ids in missing):
            alike = [ids for ids in missing if pass_shape(len(ids)) == shape]
            rows = shape[0] if self._is_trusted(model, shape) else 1
            for start in range(0, len(alike), rows):
                chunk = alike[start : start + rows]
                read_shape = shape if rows > 1 else (1, len(chunk[0]))
                read = read_prompts(model, chunk, shape=read_shape)
                found |= dict(zip(chunk, read, strict=True))
        return found

    def _is_trusted(self, model: DecodeModel, shape: tuple[int, int]) -> bool:
        key = (model.decoder, shape)
        if key not in self._trusted:
            self._trusted[key] = shape[0] == 1 or has_independent_prompts(model, shape)
        return self._trusted[key]

    def _hold(self, key: tuple[str, bool, Ids], prompt: Prompt) -> None:
        if key not in self._held:
            self._num_bytes += prompt.num_bytes
        self._held[key] = prompt
        self._held.move_to_end(key)
        while self._num_bytes > self._budget and len(self._held) > 1:
            self._num_bytes -= self._held.popitem(last=False)[1].num_bytes
