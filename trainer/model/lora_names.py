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
MAGNITUDE_SUFFIX = ".lora_magnitude_vector"
HEAD_TASK = "SEQ_CLS"
"""The task in the config of an adapter with a score head, which is that of a reward model."""

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


def adapter_magnitudes(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Module name -> the magnitude (out) of each output. Empty unless the adapter is a DoRA."""
    return {
        name.removeprefix(PEFT_PREFIX).removesuffix(MAGNITUDE_SUFFIX): tensor
        for name, tensor in tensors.items()
        if name.endswith(MAGNITUDE_SUFFIX)
    }


def output_factor(
    magnitude_O: torch.Tensor,
    weight_O_H: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
) -> torch.Tensor:
    """The factor (O) of each output of a DoRA (arXiv 2402.09353): its magnitude, divided by the length
    of its row of W + scale B A. No gradient goes through the length (section 4.3 of the paper)."""
    with torch.no_grad():
        wide = weight_O_H.to(torch.promote_types(weight_O_H.dtype, magnitude_O.dtype))
        length_O = torch.linalg.vector_norm(merged_weight(wide, pair, scale=scale), dim=1)
    return magnitude_O / length_O


def merged_weight(
    weight_O_H: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    factor_O: torch.Tensor | None = None,
    out_O_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """W + scale B A, with each row multiplied by its factor if there is one, in `out_O_H` or as a new
    tensor."""
    a_r_H, b_O_r = pair
    merged_O_H = torch.addmm(weight_O_H, b_O_r, a_r_H, alpha=scale, out=out_O_H)
    return merged_O_H if factor_O is None else merged_O_H.mul_(factor_O[:, None])
