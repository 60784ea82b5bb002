"""A policy version as the decoder reads it: named projections over base and trained tensors.

Two views of the same numbers. `Trainable` keeps adapters apart, so that gradients reach A and B and
the frozen base costs no memory; the learner uses it. `Merged` adds B A into a copy of the base and
fuses the projections that share their input, so that a decoding step is few and large matrix
products; the sampler uses it. In fp32 they agree to about 1e-6.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from trainer.adapters import PEFT_PREFIX, Tensors, adapter_pairs, merged_weight

FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""What the decoder asks for -> the modules of one layer that share an input."""


def layer_module(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}"


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """Base tensors, overlaid by trained ones: an adapter (peft's names) or full weights."""

    base: Tensors
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor that no adapter touches: norms and embeddings."""
        return self.base.get(name)

    def project(self, x_N_H: torch.Tensor, layer: int, what: str) -> tuple[torch.Tensor, ...]:
        """The outputs of the modules that `what` names, in their order."""
        return tuple(self._linear(x_N_H, layer_module(layer, name)) for name in FUSED[what])

    def _linear(self, x_N_H: torch.Tensor, module: str) -> torch.Tensor:
        y_N_O = F.linear(x_N_H, self.base[f"{module}.weight"], self.base.get(f"{module}.bias"))
        if module not in self.pairs:
            return y_N_O
        a_r_H, b_O_r = self.pairs[module]
        return torch.addmm(y_N_O, F.linear(x_N_H, a_r_H), b_O_r.t(), alpha=self.scale)


def trainable(base: Tensors, trained: Tensors, *, alpha: float) -> Trainable:
    """The view of `trained` over `base` that gradients flow through."""
    pairs = adapter_pairs(trained)
    full = {name: t for name, t in trained.items() if not name.startswith(PEFT_PREFIX)}
    rank = next((a.shape[0] for a, _ in pairs.values()), 1)
    return Trainable({**base, **_tied(base, full)}, pairs, alpha / rank)


def _tied(base: Tensors, full: Tensors) -> Tensors:
    """Full weights are stored without a tied output head: give it back."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    is_tied = embedding in full and head in base and head not in full
    return {**full, head: full[embedding]} if is_tied else full


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Fused weights of each layer, (out, in) and bias, with the width of each module's output;
    everything else by name."""

    base: Tensors
    layers: tuple[dict[str, tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]], ...]

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.base.get(name)

    def project(self, x_N_H: torch.Tensor, layer: int, what: str) -> tuple[torch.Tensor, ...]:
        weight, bias, widths = self.layers[layer][what]
        return F.linear(x_N_H, weight, bias).split(widths, dim=-1)


@torch.no_grad()
def merge(view: Trainable, *, num_layers: int) -> Merged:
    """The same policy with B A added in and projections fused; a copy of the linear layers."""
    layers = []
    for layer in range(num_layers):
        fused: dict[str, tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]] = {}
        for what, names in FUSED.items():
            modules = [layer_module(layer, name) for name in names]
            weights = [_merged_weight(view, module) for module in modules]
            widths = tuple(len(weight) for weight in weights)
            biases = [view.base.get(f"{module}.bias") for module in modules]
            known = [bias for bias in biases if bias is not None]
            bias = torch.cat(known) if len(known) == len(biases) else None
            fused[what] = (torch.cat(weights), bias, widths)
        layers.append(fused)
    rest = {k: v for k, v in view.base.items() if "_proj." not in k}
    return Merged(rest, tuple(layers))


def _merged_weight(view: Trainable, module: str) -> torch.Tensor:
    weight = view.base[f"{module}.weight"]
    pair = view.pairs.get(module)
    return weight if pair is None else merged_weight(weight, pair, scale=view.scale)
