"""A policy version as the decoder reads it: named projections over base and trained tensors.

Adapters are kept separate from the base, so that gradients reach A and B, and the frozen base needs no
memory for gradients. The sampler has its own copy, in which adapters are added to the weights
(`trainer/sampler/decode_model.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from schemas.models.architectures import LLAMA
from trainer.forward.lora_linear import AdaptedLinear, project
from trainer.model.lora_names import (
    PEFT_PREFIX,
    Scaling,
    Tensors,
    adapter_magnitudes,
    adapter_pairs,
    output_factor,
)

OUT, DOWN = ("self_attn.o_proj",), ("mlp.down_proj",)
"""The modules of the projections that every architecture has."""
FUSED: dict[str, tuple[str, ...]] = {
    "qkv": LLAMA.qkv,
    "out": OUT,
    "gate_up": LLAMA.gate_up,
    "down": DOWN,
}
"""The name of a projection -> the modules of one layer that it consists of, where layers are those of
Llama. They share an input."""


def layer_module(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}"


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """Base tensors with the trained tensors over them: an adapter (with peft's names) or full
    weights."""

    base: Tensors
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float
    dtype: torch.dtype
    """The type of the computation: the base's. Trained tensors are fp32 masters,
    rounded as they are used."""
    has_frozen_base: bool = True
    """Whether only adapters are trained."""
    factors: Tensors = field(default_factory=dict)
    """The factors (O) of the outputs of each module, if the adapter is a DoRA."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor that adapters do not change, such as a norm or an embedding; None if there is none of
        this name."""
        held = self.base.get(name)
        return None if held is None else held.to(self.dtype)

    def round_weights(self) -> "Trainable":
        """The same view with all weights rounded once, for many passes that need no gradients."""
        base = {name: tensor.to(self.dtype) for name, tensor in self.base.items()}
        pairs = {m: (a.to(self.dtype), b.to(self.dtype)) for m, (a, b) in self.pairs.items()}
        return replace(self, base=base, pairs=pairs)

    def project(self, x_N_H: torch.Tensor, modules: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """The outputs of these modules, in their order."""
        if all(module in self.pairs for module in modules) and not self.factors:
            return project(
                x_N_H, [self._adapted_linear(module) for module in modules], scale=self.scale
            )
        return tuple(self._linear(x_N_H, module) for module in modules)

    def _adapted_linear(self, module: str) -> AdaptedLinear:
        weight, bias = self.base[f"{module}.weight"], self.base.get(f"{module}.bias")
        bias = None if bias is None else bias.to(self.dtype)
        a_r_H, b_O_r = (part.to(self.dtype) for part in self.pairs[module])
        return AdaptedLinear(weight.to(self.dtype), bias, a_r_H, b_O_r)

    def _linear(self, x_N_H: torch.Tensor, module: str) -> torch.Tensor:
        weight_O_H, bias_O = self.base[f"{module}.weight"], self.base.get(f"{module}.bias")
        bias_O = None if bias_O is None else bias_O.to(self.dtype)
        factor_O = self.factors.get(module)
        y_N_O = F.linear(x_N_H, weight_O_H.to(self.dtype), bias_O if factor_O is None else None)
        if module not in self.pairs:
            return y_N_O
        a_r_H, b_O_r = (part.to(self.dtype) for part in self.pairs[module])
        y_N_O = torch.addmm(y_N_O, F.linear(x_N_H, a_r_H), b_O_r.t(), alpha=self.scale)
        if factor_O is None:
            return y_N_O
        y_N_O = y_N_O * factor_O.to(self.dtype)
        return y_N_O if bias_O is None else y_N_O + bias_O


def trainable_view(base: Tensors, trained: Tensors, *, scaling: Scaling) -> Trainable:
    """The view of `trained` over `base` that gradients flow through."""
    pairs = adapter_pairs(trained)
    full = {name: t for name, t in trained.items() if not name.startswith(PEFT_PREFIX)}
    rank = next((a.shape[0] for a, _ in pairs.values()), 1)
    dtype = next((t.dtype for t in base.values() if t.is_floating_point()), torch.float32)
    scale = scaling.factor(rank)
    factors = {
        module: output_factor(magnitude_O, base[f"{module}.weight"], pairs[module], scale=scale)
        for module, magnitude_O in adapter_magnitudes(trained).items()
    }
    return Trainable(
        {**base, **_with_tied_head(base, full)},
        pairs,
        scale,
        dtype,
        has_frozen_base=not full,
        factors=factors,
    )


def _with_tied_head(base: Tensors, full: Tensors) -> Tensors:
    """Full weights are stored without a tied output head. Add it again."""
    head = "lm_head.weight"
    if head in full or head not in base:
        return full
    embedding = next((name for name in full if name.endswith("embed_tokens.weight")), None)
    return full if embedding is None else {**full, head: full[embedding]}
