"""The names of an adapter's tensors, which are those of peft, its scaling, and the change that it makes
to a weight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from schemas.sampling import LoraScaling

PEFT_PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factor of an adapter's output: alpha / rank, or with rsLoRA (arXiv 2312.03732) alpha /
    sqrt(rank). Everything that reads an adapter gets the factor here."""

    alpha: float
    kind: LoraScaling | None = None
    """None: `standard`"""

    @property
    def is_rank_stabilized(self) -> bool:
        return self.kind == "rank_stabilized"

    def factor(self, rank: int) -> float:
        divisor = math.sqrt(rank) if self.is_rank_stabilized else rank
        return self.alpha / divisor


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
