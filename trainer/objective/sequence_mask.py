"""The off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556).

    keep_i = 0  where A < 0 and mean_t [log mu(t) - log pi_theta(t)] > threshold, else 1

mu is the policy that sampled, with the logprobs recorded at that moment. So the mask measures two kinds
of distance: the updates since then, and numerical differences between sampler and trainer. A bad
sequence that the policy would no longer produce teaches only noise. A good sequence is kept, however
large its distance is. The mask multiplies the surrogate before the KL term is added. The denominators of
the loss do not change.
"""

import torch

from trainer.objective.sequences import Rows


def keep_mask(
    behaviour_M: torch.Tensor,
    logprob_M: torch.Tensor,
    advantage_M: torch.Tensor,
    rows: Rows,
    *,
    threshold: float,
) -> torch.Tensor:
    """Which actions are kept (M, bool, no gradient). All actions of a row are kept or masked together if
    they share one advantage."""
    distance_M = rows.mean(behaviour_M - logprob_M.detach())
    return (advantage_M >= 0) | (distance_M <= threshold)
