"""The output head in full precision, whatever the type of the weights.

Large logits that are rounded to 16 bits are wrong by several hundredths, and so are logprobs and all
ratios computed from them. So states and weights in half precision are multiplied with fp32 sums, and the
result stays fp32. In the backward pass the gradient of the logits is rounded once, like every other
gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F

WIDE = (torch.float32, torch.float64)


def logits_of(hidden_M_H: torch.Tensor, weight_V_H: torch.Tensor) -> torch.Tensor:
    """The logits (M, V), at least fp32, of hidden states (M, H) under the head's weight (V, H)."""
    if hidden_M_H.dtype in WIDE:
        return F.linear(hidden_M_H, weight_V_H)
    result: torch.Tensor = _WideProduct.apply(hidden_M_H, weight_V_H)
    return result


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_M_H: torch.Tensor, weight_V_H: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_M_H, weight_V_H)
        if hidden_M_H.is_cuda:
            return torch.mm(hidden_M_H, weight_V_H.t(), out_dtype=torch.float32)
        return hidden_M_H.float() @ weight_V_H.float().t()

    @staticmethod
    def backward(
        ctx: Any, grad_M_V: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden_M_H, weight_V_H = ctx.saved_tensors
        grad_M_V = grad_M_V.to(weight_V_H.dtype)
        grad_hidden = grad_M_V @ weight_V_H if ctx.needs_input_grad[0] else None
        grad_weight = grad_M_V.t() @ hidden_M_H if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight
