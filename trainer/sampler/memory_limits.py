"""How much the sampler takes of a device, and whether its steps are recorded there."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows of a lane, and bytes of cache. `graphs`: decoding steps are recorded and replayed."""

    most_rows: int
    lane_bytes: int
    rows_bytes: int
    """how much the rows in lanes may have together; the others wait"""
    spare_bytes: int
    """how much empty lanes may keep, so that the next step need not clear (or record) anew"""
    graphs: bool = False


CPU = Limits(most_rows=64, lane_bytes=256 << 20, rows_bytes=512 << 20, spare_bytes=128 << 20)
SHARE_OF_GPU = 0.3
"""The learner's activations need the rest."""


def limits_of(device: torch.device) -> Limits:
    """What suits this device."""
    if device.type != "cuda":
        return CPU
    share = int(SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory)
    return Limits(
        most_rows=256, lane_bytes=share, rows_bytes=share, spare_bytes=share // 2, graphs=True
    )
