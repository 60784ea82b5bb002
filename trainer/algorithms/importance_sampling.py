"""Importance sampling: the plain off-policy gradient, as the Tinker API defines it.

    loss = - sum_i sum_t r_t A_i,     r_t = pi_theta(t) / mu(t),   no clip

A_i is Dr. GRPO's: the reward less the group's mean. Tinker leaves the normalisation to its caller;
here the sum is divided by a constant, S max_response_length, which moves no direction. On samples
of an older policy the gradient is right in expectation for one token at a time, and its variance is
unbounded: keep the lag small, or give clip_high to an objective that has one.
"""

import torch

from trainer.algorithms.dr_grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """What each action costs; nothing is ever clipped."""
    ratio_M = actions.log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -ratio_M * actions.advantage_M, torch.zeros_like(ratio_M, dtype=torch.bool)


OBJECTIVE = Objective(
    estimate=by_group(advantages), loss=loss, defaults=Hyperparameters(aggregation="constant")
)
