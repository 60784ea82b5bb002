# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Prompts are read once: alone, at their own length, and shared by all samples of the same prompt.

Alone means that a prompt's cache and first logits have the same bits whoever else is waiting. The
last few prompts stay, so samples of a group that arrive one by one share them too.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from trainer.decoder import Attend, Decoder, Weights, causal_attend

BUDGET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Cache of a prompt, (layers, K, P, D) each, and the logits (vocabulary) after its last
    token."""

    keys: torch.Tensor
    values: torch.Tensor
    logits_V: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size() + 4 * self.logits_V.numel()


@torch.no_grad()
def read_prompt(decoder: Decoder, weights: Weights, ids: tuple[int, ...]) -> Prompt:
    """Run a prompt through the model."""
    embedding = weights.tensor("model.embed_tokens.weight")
    assert embedding is not None  # noqa: S101
    device, length = embedding.device, len(ids)
    shape = (decoder.num_layers, decoder.kv_heads, length, decoder.head_dim)
    keys = torch.empty(shape, dtype=embedding.dtype, device=device)
    values = torch.empty_like(keys)
    causal_T_T = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    look: Attend = causal_attend(causal_T_T, kv_heads=decoder.kv_heads)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys[layer], values[layer] = k.transpose(0, 1), v.transpose(0, 1)
        return look(layer, q, k, v)

    tokens_T, positions_T = torch.tensor(ids, device=device), torch.arange(length, device=device)
    hidden_T_H = decoder.hidden(weights, tokens_T, positions_T, attend)
    return Prompt(keys, values, decoder.logits(weights, hidden_T_H[-1:])[0])


class Prompts:
    """The prompts read last, by version and ids."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._held: OrderedDict[tuple[str, tuple[int, ...]], Prompt] = OrderedDict()
        self._num_bytes = 0

    def get(self, version: str, decoder: Decoder, weights: Weights, ids: tuple[int, ...]) -> Prompt:
        """The prompt, read now if it is not held."""
        key = (version, ids)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        prompt = self._held[key] = read_prompt(decoder, weights, ids)
        self._num_bytes += prompt.num_bytes
        while self._num_bytes > self._budget and len(self._held) > 1:
            self._num_bytes -= self._held.popitem(last=False)[1].num_bytes
        return prompt
