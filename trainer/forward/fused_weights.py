"""A fused copy of the linear layers of a policy version. It differs from the original in three ways.

- The adapter's s B A is added to the weight that it adapts.
- Projections that share an input are one matrix, and the norm before them is folded into it. With
  u = x / |(x, sqrt(H eps))|, the normed input w x / rms(x) is sqrt(H) w u. So W is multiplied by
  sqrt(H) w.
- The two halves of each query and key head are interleaved, which makes the rotary embedding one
  complex product. Queries and keys are permuted in the same way, so their products do not change.

The sampler decodes with this copy (`trainer/sampler/decode_model.py`), and the learner trains adapters
with it (`trainer/forward/fused_pass.py`).

Legend: N tokens, H hidden, A query heads, K key heads, D head size, O outputs.
"""

import math
from dataclasses import dataclass

import torch

from trainer.forward.decoder import Decoder
from trainer.forward.weights import FUSED, Trainable, layer_module
from trainer.model.lora_names import merged_weight

EXACT = (torch.float32, torch.float64)
"""Types that have a complex counterpart, and that are precise enough for a different order of
operations."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The fused weights of a layer, and a bias where the model has one. Their shape is (in, out),
    because a product of few rows is 1.5 times as fast when it reads weights along the rows."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """(A + K, D): the weights of the norms of the heads, multiplied by sqrt(D)"""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def pad(like: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    """The extra component that adds as much to the length of a vector as eps adds to its mean square."""
    return like.new_tensor(math.sqrt(size * eps))


def unit(x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
    """x divided by the length of (x, pad), along the last dimension."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(pad)


def rotations(decoder: Decoder, positions_N: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The rotary embedding of each position, (N, 1, D / 2), complex."""
    angles = positions_N[:, None].float() * decoder.rope.inverse_frequencies
    turn = torch.complex(angles.cos(), angles.sin())[:, None] * decoder.rope.scale
    return turn.to(dtype.to_complex())


def interleaved_order(decoder: Decoder, *, device: torch.device) -> torch.Tensor:
    """The order of the fused outputs, as indexes into the outputs of q, k and v. In the heads of q and k
    the two halves are interleaved."""
    size, turned = decoder.head_dim, decoder.heads + decoder.kv_heads
    order = torch.arange((turned + decoder.kv_heads) * size, device=device).view(-1, size)
    by_half = order[:turned].view(turned, 2, -1).transpose(1, 2).reshape(turned, size)
    return torch.cat([by_half, order[turned:]]).flatten()


def norm_fold(view: Trainable, layer: int, what: str) -> torch.Tensor | None:
    """The factor (H) that the norm before `what` contributes to its weights; None without such a
    norm."""
    norm = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}.get(what)
    if norm is None:
        return None
    weight_H = view.base[layer_module(layer, f"{norm}.weight")]
    return weight_H * math.sqrt(len(weight_H))


def fuse_layer(decoder: Decoder, view: Trainable, layer: int) -> LayerWeights:
    """The fused weights of one layer of the version `view`."""

    def read(what: str, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        modules = [layer_module(layer, module) for module in FUSED[what]]
        weight_O_H = _merged_weights(view, modules)
        known = [
            b for b in (view.base.get(f"{module}.bias") for module in modules) if b is not None
        ]
        bias_O = torch.cat(known) if len(known) == len(modules) else None
        if order is not None:
            weight_O_H = weight_O_H[order]
            bias_O = None if bias_O is None else bias_O[order]
        fold_H = norm_fold(view, layer, what)
        if fold_H is not None:
            weight_O_H.mul_(fold_H)
        return weight_O_H.t().contiguous(), bias_O

    order = interleaved_order(decoder, device=view.base["model.embed_tokens.weight"].device)
    qkv, qkv_bias = read("qkv", order)
    out, out_bias = read("out", None)
    gate_up, gate_up_bias = read("gate_up", None)
    down, down_bias = read("down", None)
    norms = qk_norm(decoder, view, layer)
    return LayerWeights(
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=None if norms is None else norms[:, order[: decoder.head_dim]],
        out=out,
        out_bias=out_bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )


def qk_norm(decoder: Decoder, view: Trainable, layer: int) -> torch.Tensor | None:
    """The factor of each query and key head after its length was made 1, (A + K, D)."""
    q_norm, k_norm = (
        view.base.get(layer_module(layer, f"self_attn.{name}.weight"))
        for name in ("q_norm", "k_norm")
    )
    if q_norm is None or k_norm is None:
        return None
    rows = torch.stack([q_norm] * decoder.heads + [k_norm] * decoder.kv_heads)
    return rows * math.sqrt(decoder.head_dim)


def _merged_weights(view: Trainable, modules: list[str]) -> torch.Tensor:
    """The weights of the modules with their adapters added, one after the other, in a new tensor."""
    weights = [view.base[f"{module}.weight"] for module in modules]
    sizes = [len(weight_O_H) for weight_O_H in weights]
    merged = weights[0].new_empty(sum(sizes), weights[0].shape[1])
    for module, weight_O_H, out_O_H in zip(modules, weights, merged.split(sizes), strict=True):
        pair, factor_O = view.pairs.get(module), view.factors.get(module)
        if pair is None:
            out_O_H.copy_(weight_O_H)
        else:
            merged_weight(weight_O_H, pair, scale=view.scale, factor_O=factor_O, out_O_H=out_O_H)
    return merged
