"""Importance sampling: the plain off-policy gradient, as the Tinker API defines it.

    loss = - sum_i sum_t r_t A_i,     r_t = pi_theta(t) / mu(t),   no clip

A_i is Dr. GRPO's: the reward minus the mean of the group. Tinker leaves the normalisation to its caller.
Here the sum is divided by a constant, S max_response_length, which does not change its direction. On
samples of an older policy the gradient of each single token is correct in expectation, but its variance
is unbounded. So keep the lag small, or use an objective that clips.
"""

import torch

from trainer.algorithms.dr_grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and which actions are clipped (M, bool), which is none."""
    ratio_M = actions.log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -ratio_M * actions.advantage_M, torch.zeros_like(ratio_M, dtype=torch.bool)


OBJECTIVE = Objective(
    estimate=by_group(advantages), loss=loss, defaults=Hyperparameters(aggregation="constant")
)
