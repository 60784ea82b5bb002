"""The clipped value loss of PPO, as in TRL and verl.

    max((V - G)^2, (clip(V, V_old - e, V_old + e) - G)^2) / 2

e is value_clip. V may move towards the return G by at most e, measured from V_old. Beyond that the loss
is constant.
"""

import torch

from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.metrics import Means
from trainer.objective.objective import ActionValues


def critic_loss(
    value_M: torch.Tensor, fixed: ActionValues, hyperparameters: Hyperparameters, means: Means
) -> torch.Tensor:
    """The loss (M) of the critic at each action, times value_coef. It is 0 where the sample has no
    reward to learn from. `value_M` is the critic's current prediction, with a gradient. Its metrics are
    added to `means`."""
    loss_M, clipped_M = value_loss(
        value_M, fixed["value"], fixed["return"], clip=hyperparameters.value_clip
    )
    loss_M = loss_M * fixed["known"]
    means.add_sum("train/value_loss", (fixed["weight"] * loss_M).sum())
    means.add("train/value_clip_ratio", clipped_M)
    means.add("train/value", value_M.detach())
    return hyperparameters.value_coef * loss_M


def value_loss(
    value_M: torch.Tensor, before_M: torch.Tensor, return_M: torch.Tensor, *, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the larger of the two squared errors of each value (M), and whether that of the clipped value
    is larger (M, bool). `before_M` is V_old."""
    near_M = value_M.clamp(before_M - clip, before_M + clip)
    free_M, bound_M = (value_M - return_M).square(), (near_M - return_M).square()
    return torch.maximum(free_M, bound_M) / 2, bound_M > free_M
