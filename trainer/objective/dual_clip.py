"""Two-sided clipping (INTELLECT-2, arXiv 2505.07291; dual-clip PPO, arXiv 1912.09729).

    - min( min(r, delta) A, clip(r, 1 - low, 1 + high) A ),     delta > 1 + high

Where A < 0 the clipped surrogate has no bound: a bad token that has become much more likely contributes
r A, however large r is. delta bounds r in that branch. Where A > 0, delta changes nothing.
"""

import torch


def dual_clipped_ratio(ratio_M: torch.Tensor, delta: float | None) -> torch.Tensor:
    """The ratio (M) of the unclipped branch, at most `delta`. It is unchanged when `delta` is None."""
    return ratio_M if delta is None else ratio_M.clamp(max=delta)
