"""Root mean square norm (arXiv 1910.07467), with its gradient written out.

    y = w x / rms(x),   rms(x) = sqrt(mean(x^2) + eps)

Elementary torch operations would keep about six copies of x for the backward pass. On small models that
costs as much as a projection. With the gradient written out, the norm keeps only x itself and one number
per row. States in half precision are normalised in fp32.
"""

from typing import Any

import torch


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        low, low_weight = x.dtype, weight.dtype
        x, weight, grad = (t.to(inverse.dtype) for t in (x, weight, grad))
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * x).mul_(inverse).flatten(0, -2).sum(0).to(low_weight)
        if ctx.needs_input_grad[0]:
            scaled = grad * weight
            along = (scaled * x).mean(-1, keepdim=True) * inverse.pow(3)
            grad_x = scaled.mul_(inverse).addcmul_(x, along, value=-1).to(low)
        return grad_x, grad_weight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise over the last dimension and scale by `weight`; any leading shape."""
    result: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return result
