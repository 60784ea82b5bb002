"""A policy version as the sampler runs it.

`Fused` is a copy of the linear layers made for decoding, where a step is many small operations and
each costs more to start than to compute. Per version, once:

- B A is added to the weight it adapts.
- Projections that share an input are one matrix, and the norm before them is folded into it: with
  u = x / |(x, sqrt(H eps))|, the normed input w x / rms(x) is sqrt(H) w u, so W takes sqrt(H) w.
- The two halves of each query and key head are interleaved, which makes the rotary embedding one
  complex product. Queries and keys are permuted alike, so their products stay what they were.

`Apart` reads base and adapter as they are, for models too large to copy. Both agree with the
learner's pass to about 1e-6 in fp32. A version is one or the other for as long as it is served: the
keys in a cache are in the order of the model that wrote them.

Legend: N tokens, H hidden, A query heads, K key heads, D head size, O outputs.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from trainer.adapters import merged_weight
from trainer.decoder import Attend, Decoder
from trainer.weights import FUSED, Trainable, layer_module

COPY_BYTES = 2 << 30
"""Larger bases are not copied."""
EXACT = (torch.float32, torch.float64)
"""Types that have a complex twin, and rounding small enough to move it around."""


class Model(Protocol):
    """What decodes: token ids and positions -> final hidden states -> logits."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def embedding(self) -> torch.Tensor: ...
    def hidden(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor: ...
    def logits(self, hidden_M_H: torch.Tensor) -> torch.Tensor: ...


def model_of(decoder: Decoder, view: Trainable, *, num_bytes: int, copies: bool = True) -> Model:
    """The version `view` over a base of this size; `copies`: whether it may be made anew for
    decoding."""
    apart = Apart(decoder, view.rounded())
    if not copies or num_bytes > COPY_BYTES or apart.embedding.dtype not in EXACT:
        return apart
    return fuse(apart)


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """Base and adapter as they are."""

    decoder: Decoder
    view: Trainable

    @property
    def embedding(self) -> torch.Tensor:
        return self.view.base["model.embed_tokens.weight"]

    def hidden(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        return self.decoder.hidden(self.view, tokens_N, positions_N, attend)

    def logits(self, hidden_M_H: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(self.view, hidden_M_H)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Fused weights with a bias where the model has one. They lie as (in, out): read along the rows a
    product of few rows is half as fast again."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """(A + K, D), times sqrt(D)"""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """Everything added in and folded."""

    decoder: Decoder
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    """of the last hidden states, times sqrt(H)"""
    head: torch.Tensor
    """(H, vocabulary)"""

    def hidden(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        decoder = self.decoder
        heads = decoder.heads + decoder.kv_heads
        x_N_H = F.embedding(tokens_N, self.embedding)
        angles = positions_N[:, None].float() * decoder.inverse_frequencies
        turn = torch.complex(angles.cos(), angles.sin())[:, None] * decoder.rope_scale
        turn = turn.to(x_N_H.dtype.to_complex())
        wide, narrow = (
            x_N_H.new_tensor(math.sqrt(size * decoder.eps))
            for size in (x_N_H.shape[1], decoder.head_dim)
        )
        for number, layer in enumerate(self.layers):
            qkv = _linear(_unit(x_N_H, wide), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(qkv), -1, decoder.head_dim)
            qk, v = qkv[:, :heads], qkv[:, heads:]
            if layer.qk_norm is not None:
                qk = _unit(qk, narrow).mul_(layer.qk_norm)
            pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)))
            qk = torch.view_as_real(pairs * turn).flatten(-2)
            attended = attend(number, qk[:, : decoder.heads], qk[:, decoder.heads :], v)
            x_N_H = _added(x_N_H, attended, layer.out, layer.out_bias)
            gate_up = _linear(_unit(x_N_H, wide), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            x_N_H = _added(x_N_H, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return _unit(x_N_H, wide).mul_(self.norm)

    def logits(self, hidden_M_H: torch.Tensor) -> torch.Tensor:
        return hidden_M_H @ self.head


def _unit(x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
    """x over the length of (x, pad): pad is sqrt(size eps)."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(pad)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _added(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The residual x plus a projection of y."""
    x = torch.addmm(x, y, weight)
    return x if bias is None else x.add_(bias)


@torch.no_grad()
def fuse(apart: Apart) -> Fused:
    """The same policy, fused: a copy of the linear layers."""
    decoder, view = apart.decoder, apart.view
    norm = view.base["model.norm.weight"]
    head = view.base.get("lm_head.weight", apart.embedding)
    return Fused(
        decoder=decoder,
        embedding=apart.embedding,
        layers=tuple(_layer(decoder, view, layer) for layer in range(decoder.num_layers)),
        norm=norm * math.sqrt(len(norm)),
        head=head.t(),
    )


def _layer(decoder: Decoder, view: Trainable, layer: int) -> Layer:
    size = decoder.head_dim
    order = torch.arange(size).view(2, -1).t().flatten()
    name = f"model.layers.{layer}."

    def read(what: str, *, norm: str | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        modules = [layer_module(layer, module) for module in FUSED[what]]
        weight_O_H = torch.cat([_merged(view, module) for module in modules])
        biases = [view.base.get(f"{module}.bias") for module in modules]
        known = [bias for bias in biases if bias is not None]
        bias_O = torch.cat(known) if len(known) == len(biases) else None
        if norm is not None:
            folded_H = view.base[f"{name}{norm}.weight"]
            weight_O_H = weight_O_H * (folded_H * math.sqrt(len(folded_H)))
        return weight_O_H, bias_O

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        """Rows (or biases) of q, k and v: the heads of q and k take the new order."""
        by_head = x.unflatten(0, (-1, size)).clone()
        turned = decoder.heads + decoder.kv_heads
        by_head[:turned] = by_head[:turned][:, order.to(x.device)]
        return by_head.flatten(0, 1)

    qkv, qkv_bias = read("qkv", norm="input_layernorm")
    out, out_bias = read("out")
    gate_up, gate_up_bias = read("gate_up", norm="post_attention_layernorm")
    down, down_bias = read("down")
    q_norm = view.base.get(f"{name}self_attn.q_norm.weight")
    k_norm = view.base.get(f"{name}self_attn.k_norm.weight")
    qk_norm = None
    if q_norm is not None and k_norm is not None:
        rows = [q_norm] * decoder.heads + [k_norm] * decoder.kv_heads
        qk_norm = torch.stack(rows)[:, order.to(q_norm.device)] * math.sqrt(size)
    return Layer(
        qkv=interleaved(qkv).t().contiguous(),
        qkv_bias=None if qkv_bias is None else interleaved(qkv_bias),
        qk_norm=qk_norm,
        out=out.t().contiguous(),
        out_bias=out_bias,
        gate_up=gate_up.t().contiguous(),
        gate_up_bias=gate_up_bias,
        down=down.t().contiguous(),
        down_bias=down_bias,
    )


def _merged(view: Trainable, module: str) -> torch.Tensor:
    weight = view.base[f"{module}.weight"]
    pair = view.pairs.get(module)
    return weight if pair is None else merged_weight(weight, pair, scale=view.scale)
