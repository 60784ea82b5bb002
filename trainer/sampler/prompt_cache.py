"""Keeps the prompts that were read last, so samples of a group that arrive one by one share them.

How a prompt is read never changes its bits. Prompts through torch are read as a tree
(`trainer/sampler/prompt_tree.py`) where that was tried and has the bits of whole passes
(`trainer/sampler/prefill.py`), else in these passes, or alone if one prompt in a pass changes another.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal

from trainer.forward.decoder import Decoder
from trainer.native.interface import NativeDecoder
from trainer.sampler.decode_model import DecodeModel, FusedModel
from trainer.sampler.prefill import (
    Ids,
    NativePrompt,
    Prompt,
    TorchPrompt,
    has_independent_prompts,
    pass_shape,
    read_prompts,
)
from trainer.sampler.prompt_tree import has_exact_tree, read_tree

BUDGET_BYTES = 64 << 20

Kind = Literal["tree", "passes", "alone"]
Key = tuple[str, bool, Ids]
"""The version of a prompt, whether it was read in C, and its ids."""


class PromptCache:
    """A cache of the prompts that were read last, by version and ids."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._held: OrderedDict[Key, Prompt] = OrderedDict()
        self._num_bytes = 0
        self._kinds: dict[tuple[Decoder, tuple[int, int]], Kind] = {}

    def get(
        self,
        version: str,
        model: DecodeModel,
        prompts: Sequence[Ids],
        *,
        native: NativeDecoder | None,
    ) -> dict[Ids, Prompt]:
        """The prompts, by their ids. Those that are not in the cache are read now, by `native` or
        through torch."""
        kind = (version, native is not None)
        keys = {ids: (*kind, ids) for ids in prompts}
        found = {ids: self._held[key] for ids, key in keys.items() if key in self._held}
        missing = [ids for ids in keys if ids not in found]
        if native is not None:
            read = zip(missing, native.read(missing), strict=True)
            found |= {ids: NativePrompt(logits_V, cache) for ids, (cache, logits_V) in read}
        else:
            held = {key[2]: p for key, p in self._held.items() if key[:2] == kind}
            for shape in dict.fromkeys(pass_shape(len(ids)) for ids in missing):
                alike = [ids for ids in missing if pass_shape(len(ids)) == shape]
                found |= self._read_through_torch(model, alike, shape, held)
        for ids, prompt in found.items():
            self._hold(keys[ids], prompt)
        return found

    def _read_through_torch(
        self,
        model: DecodeModel,
        prompts: Sequence[Ids],
        shape: tuple[int, int],
        held: Mapping[Ids, Prompt],
    ) -> dict[Ids, TorchPrompt]:
        """The prompts, which are all read in passes of this shape. `held` are others of the version."""
        kind = self._kind_of(model, shape)
        if kind == "tree" and isinstance(model, FusedModel):
            alike = {
                ids: prompt
                for ids, prompt in held.items()
                if isinstance(prompt, TorchPrompt) and pass_shape(len(ids)) == shape
            }
            return read_tree(model, prompts, shape=shape, held=alike)
        found: dict[Ids, TorchPrompt] = {}
        rows = shape[0] if kind == "passes" else 1
        for start in range(0, len(prompts), rows):
            chunk = prompts[start : start + rows]
            read_shape = shape if rows > 1 else (1, len(chunk[0]))
            found |= zip(chunk, read_prompts(model, chunk, shape=read_shape), strict=True)
        return found

    def _kind_of(self, model: DecodeModel, shape: tuple[int, int]) -> Kind:
        """How prompts of this shape are read. It is tried on this machine."""
        key = (model.decoder, shape)
        if key not in self._kinds:
            self._kinds[key] = _find_kind(model, shape)
        return self._kinds[key]

    def _hold(self, key: Key, prompt: Prompt) -> None:
        if key not in self._held:
            self._num_bytes += prompt.num_bytes
        self._held[key] = prompt
        self._held.move_to_end(key)
        while self._num_bytes > self._budget and len(self._held) > 1:
            self._num_bytes -= self._held.popitem(last=False)[1].num_bytes


def _find_kind(model: DecodeModel, shape: tuple[int, int]) -> Kind:
    if shape[0] == 1:
        return "alone"
    if isinstance(model, FusedModel) and not model.is_narrow and has_exact_tree(model, shape):
        return "tree"
    return "passes" if has_independent_prompts(model, shape) else "alone"
