# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""The learner's pass over a base with adapters, fused, with its gradient written out.

On a small machine, a pass of a small model spends as much time on the operations between the matrix
products, and on the thin products of the adapters, as on the products with the base. Here weight and
adapter are added to one matrix (`trainer/forward/fused_weights.py`), so the forward pass has no separate
adapters. A layer is three operations. The backward pass of each works in place, and computes all
gradients of its input in one product:

    u = x / |(x, pad)|,   y = u W,   W = fold (W_0 + s B A)'      W_0 and fold frozen
    dB = s dy' (u A'),  dA = s (dy B)' u,  du = dy W',  dx = (du - u (u . du)) / |(x, pad)|

Kept per token and layer: u twice, the normed heads, and the input of the MLP's gate. In float64, values
and gradients equal those of the plain pass (`trainer/forward/decoder.py`) up to rounding. The fused pass
runs where the weights' type has a complex counterpart, and the base is frozen and small enough to copy.

Legend: N tokens, H hidden, A query heads, K key heads, D head size, I inner size of the MLP, O
outputs, r rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trainer.forward.decoder import Attend, Decoder
from trainer.forward.fused_weights import (
    EXACT,
    LayerWeights,
    fuse_layer,
    interleaved_order,
    norm_fold,
    pad,
    rotations,
)
from trainer.forward.ops import Forward
from trainer.forward.rms_norm import rms_norm
from trainer.forward.weights import FUSED, Trainable, layer_module

COPY_BYTES = 1 << 30
"""The size of the largest base that is copied for a pass."""


def can_fuse(decoder: Decoder, view: Trainable, *, num_bytes: int) -> bool:
    """Whether a pass over this version, with a base of `num_bytes` bytes, runs fused."""
    embedding = view.base[decoder.embedding]
    return (
        decoder.is_plain
        and view.has_frozen_base
        and not view.factors
        and view.dtype in EXACT
        and embedding.device.type == "cpu"
        and num_bytes <= COPY_BYTES
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One adapter of a fused weight: the outputs that it adds to, its ranks in `Adapters.a_r_H`, and its
    B."""

    outputs: slice
    ranks: slice
    b_O_r: torch.Tensor
    """B, multiplied by the scale"""


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The adapters of the projections that share an input, in the order of the fused weight's
    outputs."""

    a_r_H: torch.Tensor
    """The A of all parts, one after the other, multiplied by the factor of the norm before them."""
    fold_H: torch.Tensor | None
    parts: tuple[Part, ...]
    scale: float
    unordered_O: torch.Tensor | None
    """The index of each module output in the fused outputs; None if the order is the same."""
    dtype: torch.dtype
    """The type of the trained tensors."""

    def gradients(self, u_N_H: torch.Tensor, grad_N_O: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of A and B of each part, in order, from the gradient of the fused outputs."""
        if not self.parts:
            return []
        low_N_r = u_N_H @ self.a_r_H.t()
        grad_low_N_r = torch.empty_like(low_N_r)
        grad_bs = []
        for part in self.parts:
            here_N_O = grad_N_O[:, part.outputs]
            torch.mm(here_N_O, part.b_O_r, out=grad_low_N_r[:, part.ranks])
            grad_b_O_r = (here_N_O.t() @ low_N_r[:, part.ranks]).mul_(self.scale)
            if self.unordered_O is not None:
                places_O = self.unordered_O[part.outputs] - part.outputs.start
                grad_b_O_r = grad_b_O_r.index_select(0, places_O)
            grad_bs.append(grad_b_O_r)
        grad_a_r_H = grad_low_N_r.t() @ u_N_H
        if self.fold_H is not None:
            grad_a_r_H.mul_(self.fold_H)
        grads: list[torch.Tensor] = []
        for part, grad_b_O_r in zip(self.parts, grad_bs, strict=True):
            grads += (grad_a_r_H[part.ranks].to(self.dtype), grad_b_O_r.to(self.dtype))
        return grads


def _adapters(
    view: Trainable, layer: int, what: str, *, order_O: torch.Tensor | None
) -> tuple[Adapters, list[torch.Tensor]]:
    """The adapters, and the trained tensors that their gradients belong to."""
    fold_H = norm_fold(view, layer, what)
    lows, parts, trained = [], [], []
    num_outputs = num_ranks = 0
    for name in FUSED[what]:
        module = layer_module(layer, name)
        size = len(view.base[f"{module}.weight"])
        outputs = slice(num_outputs, num_outputs + size)
        num_outputs += size
        if module not in view.pairs:
            continue
        a_r_H, b_O_r = view.pairs[module]
        trained += [a_r_H, b_O_r]
        ranks = slice(num_ranks, num_ranks + len(a_r_H))
        num_ranks += len(a_r_H)
        lows.append(a_r_H.to(view.dtype))
        b_O_r = b_O_r.to(view.dtype) * view.scale
        if order_O is not None:
            b_O_r = b_O_r.index_select(0, order_O[outputs] - outputs.start)
        parts.append(Part(outputs, ranks, b_O_r))
    nothing = view.base["model.embed_tokens.weight"].new_zeros(0, 1)
    a_r_H = torch.cat(lows) if lows else nothing
    if lows and fold_H is not None:
        a_r_H = a_r_H * fold_H
    unordered_O = None if order_O is None else order_O.argsort()
    dtype = trained[0].dtype if trained else view.dtype
    return Adapters(a_r_H, fold_H, tuple(parts), view.scale, unordered_O, dtype), trained


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """A fused layer, its adapters, and the trained tensors that the adapters consist of."""

    weights: LayerWeights
    adapters: dict[str, Adapters]
    trained: dict[str, list[torch.Tensor]]


@torch.no_grad()
def fused_layers(decoder: Decoder, view: Trainable) -> Iterator[FusedLayer]:
    """The fused layers of a version, in order. Each is made when the iterator reaches it."""
    order_O = interleaved_order(decoder, device=view.base[decoder.embedding].device)
    rounded = view.round_weights()
    for layer in range(decoder.num_layers):
        found = {
            what: _adapters(view, layer, what, order_O=order_O if what == "qkv" else None)
            for what in FUSED
        }
        yield FusedLayer(
            fuse_layer(decoder, rounded, layer),
            {what: adapters for what, (adapters, _) in found.items()},
            {what: trained for what, (_, trained) in found.items()},
        )


def fused_hidden(
    decoder: Decoder,
    view: Trainable,
    tokens_N: torch.Tensor,
    positions_N: torch.Tensor,
    attend: Attend,
    forward: Forward,
) -> torch.Tensor:
    """The final hidden states (N, H) of tokens (N) at these positions (N), as `Decoder.hidden_states`
    returns them."""
    x_N_H = F.embedding(tokens_N, view.base[decoder.embedding])
    turn = rotations(decoder, positions_N, dtype=x_N_H.dtype)
    for number, layer in enumerate(fused_layers(decoder, view)):
        x_N_H = forward.layer(_layer, decoder, layer, number, x_N_H, turn, attend)
    return rms_norm(x_N_H, view.base["model.norm.weight"], decoder.eps)


def _layer(
    decoder: Decoder,
    layer: FusedLayer,
    number: int,
    x_N_H: torch.Tensor,
    turn: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    weights, adapters, trained = layer.weights, layer.adapters, layer.trained
    q, k, v = _Heads.apply(x_N_H, decoder, weights, adapters["qkv"], turn, *trained["qkv"])
    x_N_H = _Out.apply(x_N_H, attend(number, q, k, v), weights, adapters["out"], *trained["out"])
    ends = (adapters["gate_up"], adapters["down"])
    both = (*trained["gate_up"], *trained["down"])
    result: torch.Tensor = _Mlp.apply(x_N_H, decoder, weights, ends, *both)
    return result


def _unit(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x divided by the length of (x, pad), and that length."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(pad(x, x.shape[-1], eps))
    return x / length, length


def _through_unit(grad: torch.Tensor, u: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """The gradient of x from that of u. It overwrites the gradient of u."""
    along = torch.linalg.vecdot(grad, u)[..., None]
    return grad.addcmul_(u, along, value=-1).div_(length)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _add_projection(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    x = torch.addmm(x, y, weight)
    return x if bias is None else x.add_(bias)


def _complex_heads(x_N_A_D: torch.Tensor) -> torch.Tensor:
    """A view of the heads as complex numbers (N, A, D / 2), in the same memory."""
    return torch.view_as_complex(x_N_A_D.unflatten(-1, (-1, 2)))


class _Heads(torch.autograd.Function):
    """x -> queries, keys and values: norm, projection, norms of the heads, rotary embedding."""

    @staticmethod
    def forward(
        ctx: Any,
        x_N_H: torch.Tensor,
        decoder: Decoder,
        weights: LayerWeights,
        adapters: Adapters,
        turn: torch.Tensor,
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        u_N_H, length = _unit(x_N_H, decoder.eps)
        qkv = _product(u_N_H, weights.qkv, weights.qkv_bias).unflatten(-1, (-1, decoder.head_dim))
        turned = decoder.heads + decoder.kv_heads
        heads, normed, lengths = qkv[:, :turned], None, None
        if weights.qk_norm is not None:
            normed, lengths = _unit(heads, decoder.eps)
            heads = normed * weights.qk_norm
        _complex_heads(heads).mul_(turn)
        ctx.save_for_backward(u_N_H, length, normed, lengths)
        ctx.decoder, ctx.weights, ctx.adapters, ctx.turn = decoder, weights, adapters, turn
        return heads[:, : decoder.heads], heads[:, decoder.heads :], qkv[:, turned:]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        u_N_H, length, normed, lengths = ctx.saved_tensors
        weights: LayerWeights = ctx.weights
        turned = ctx.decoder.heads + ctx.decoder.kv_heads
        grad = torch.cat((grad_q, grad_k, grad_v), dim=1)
        heads = grad[:, :turned]
        _complex_heads(heads).mul_(ctx.turn.conj())
        if weights.qk_norm is not None:
            _through_unit(heads.mul_(weights.qk_norm), normed, lengths)
        grad_N_O = grad.flatten(1)
        grads = ctx.adapters.gradients(u_N_H, grad_N_O)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _through_unit(grad_N_O @ weights.qkv.t(), u_N_H, length)
        return grad_x, None, None, None, None, *grads


class _Out(torch.autograd.Function):
    """Adds the projection of the attention's output to the residual x."""

    @staticmethod
    def forward(
        ctx: Any,
        x_N_H: torch.Tensor,
        attended_N_AD: torch.Tensor,
        weights: LayerWeights,
        adapters: Adapters,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(attended_N_AD)
        ctx.weights, ctx.adapters = weights, adapters
        return _add_projection(x_N_H, attended_N_AD, weights.out, weights.out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N_H: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (attended_N_AD,) = ctx.saved_tensors
        grads = ctx.adapters.gradients(attended_N_AD, grad_N_H)
        grad_attended = grad_N_H @ ctx.weights.out.t() if ctx.needs_input_grad[1] else None
        return grad_N_H, grad_attended, None, None, *grads


class _Mlp(torch.autograd.Function):
    """Adds down(silu(gate) up) of the normed x to the residual x."""

    @staticmethod
    def forward(
        ctx: Any,
        x_N_H: torch.Tensor,
        decoder: Decoder,
        weights: LayerWeights,
        adapters: tuple[Adapters, Adapters],
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        u_N_H, length = _unit(x_N_H, decoder.eps)
        gate_up = _product(u_N_H, weights.gate_up, weights.gate_up_bias)
        gate_N_I, up_N_I = gate_up.chunk(2, dim=-1)
        inner_N_I = F.silu(gate_N_I).mul_(up_N_I)
        ctx.save_for_backward(u_N_H, length, gate_up, inner_N_I)
        ctx.weights, ctx.adapters = weights, adapters
        return _add_projection(x_N_H, inner_N_I, weights.down, weights.down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N_H: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        u_N_H, length, gate_up, inner_N_I = ctx.saved_tensors
        weights: LayerWeights = ctx.weights
        first, last = ctx.adapters
        down_grads = last.gradients(inner_N_I, grad_N_H)
        grad_inner = grad_N_H @ weights.down.t()
        grad_gate_up = _through_gate(grad_inner, gate_up)
        grads = first.gradients(u_N_H, grad_gate_up)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_u = grad_gate_up @ weights.gate_up.t()
            grad_x = _through_unit(grad_u, u_N_H, length).add_(grad_N_H)
        return grad_x, None, None, None, *grads, *down_grads


def _through_gate(grad_N_I: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of gate and up, side by side, from that of silu(gate) up."""
    gate_N_I, up_N_I = gate_up.chunk(2, dim=-1)
    grad = torch.empty_like(gate_up)
    grad_gate, grad_up = grad.chunk(2, dim=-1)
    torch.mul(grad_N_I, up_N_I, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_up, gate_N_I, grad_input=grad_gate)
    torch.mul(F.silu(gate_N_I), grad_N_I, out=grad_up)
    return grad
