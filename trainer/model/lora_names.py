"""The names of an adapter's tensors, which are those of peft, and the change that an adapter makes to a
weight."""

from collections.abc import Mapping

import torch

PEFT_PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"

Tensors = Mapping[str, torch.Tensor]


def adapter_pairs(tensors: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module name -> (A (rank, in), B (out, rank)). Raises KeyError when an A has no B."""
    return {
        name.removeprefix(PEFT_PREFIX).removesuffix(A_SUFFIX): (
            tensor,
            tensors[name.removesuffix(A_SUFFIX) + B_SUFFIX],
        )
        for name, tensor in tensors.items()
        if name.endswith(A_SUFFIX)
    }


def merged_weight(
    weight_O_H: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], *, scale: float
) -> torch.Tensor:
    """W + scale B A, as a new tensor."""
    a_r_H, b_O_r = pair
    return torch.addmm(weight_O_H, b_O_r, a_r_H, alpha=scale)
