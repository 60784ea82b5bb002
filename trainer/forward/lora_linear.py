"""Projections that share an input and have an adapter each, with their gradient written out.

    y_i = x W_i' + b_i + s (x A_i') B_i'          W_i and b_i frozen

If they were written as single torch operations, the adapters of q, k and v (or of gate and up) would
each read x again and keep a copy of y_i, and their gradients of x would be added one by one. Here the
A_i are one matrix, the adapters are added to the outputs in place, and all gradients of x are summed in
one tensor. Only x, and x A' with as many columns as ranks, are kept for the backward pass.

Legend: N tokens, H inputs, O outputs, r rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLinear:
    """One module: its frozen weight (O, H) and bias (O), and its adapter with A (r, H) and B (O, r)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor


def project(
    x_N_H: torch.Tensor, modules: Sequence[AdaptedLinear], *, scale: float
) -> tuple[torch.Tensor, ...]:
    """The output (N, O) of each module."""
    frozen = tuple((module.weight, module.bias) for module in modules)
    trained = [tensor for module in modules for tensor in (module.a, module.b)]
    outputs: tuple[torch.Tensor, ...] = _Project.apply(x_N_H, frozen, scale, *trained)
    return outputs


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_N_H: torch.Tensor,
        frozen: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],
        scale: float,
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        low_N_r = x_N_H @ torch.cat(trained[::2]).t()
        outputs = []
        for (weight, bias), b, low in _zip_modules(frozen, trained, low_N_r):
            outputs.append(F.linear(x_N_H, weight, bias).addmm_(low, b.t(), alpha=scale))
        ctx.save_for_backward(x_N_H, low_N_r, *trained)
        ctx.frozen, ctx.scale = frozen, scale
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_N_H, low_N_r, *trained = ctx.saved_tensors
        grad_low_N_r = torch.empty_like(low_N_r)
        into = _columns(grad_low_N_r, trained)
        zipped = _zip_modules(ctx.frozen, trained, low_N_r)
        grad_bs = []
        for grad, (_, b, low), here in zip(grads, zipped, into, strict=True):
            torch.mul(grad @ b, ctx.scale, out=here)
            grad_bs.append((grad.t() @ low).mul_(ctx.scale))
        grad_as = (grad_low_N_r.t() @ x_N_H).split([len(a) for a in trained[::2]])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_low_N_r @ torch.cat(trained[::2])
            for grad, (weight, _) in zip(grads, ctx.frozen, strict=True):
                grad_x.addmm_(grad, weight)
        pairs = zip(grad_as, grad_bs, strict=True)
        return grad_x, None, None, *(grad for pair in pairs for grad in pair)


def _columns(low_N_r: torch.Tensor, trained: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The columns of `low_N_r` that belong to each module."""
    return low_N_r.split([len(a) for a in trained[::2]], dim=1)


def _zip_modules(
    frozen: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    trained: Sequence[torch.Tensor],
    low_N_r: torch.Tensor,
) -> "zip[tuple[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, torch.Tensor]]":
    return zip(frozen, trained[1::2], _columns(low_N_r, trained), strict=True)
