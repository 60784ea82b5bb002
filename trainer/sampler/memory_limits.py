"""How much memory of a device the sampler takes, and whether its steps are recorded there."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Rows of a batch, and bytes of cache. `uses_graphs`: decoding steps are recorded and replayed."""

    most_rows: int
    batch_bytes: int
    rows_bytes: int
    """How many bytes all rows in batches may use together. Other rows wait."""
    spare_bytes: int
    """How many bytes empty batches may keep, so that the next rows need no new cache, which would have
    to be cleared (or recorded) again."""
    uses_graphs: bool = False


CPU = MemoryLimits(most_rows=48, batch_bytes=256 << 20, rows_bytes=512 << 20, spare_bytes=128 << 20)
SHARE_OF_GPU = 0.3
"""The share of a GPU's memory for the sampler. The learner's activations need the rest."""


def memory_limits_of(device: torch.device) -> MemoryLimits:
    """The limits for this device."""
    if device.type != "cuda":
        return CPU
    share = int(SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory)
    return MemoryLimits(
        most_rows=256, batch_bytes=share, rows_bytes=share, spare_bytes=share // 2, uses_graphs=True
    )
