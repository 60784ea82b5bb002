"""CISPO: clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585; ScaleRL, 2510.13786).

    loss = - (1 / sum_i len_i) sum_i sum_t stopgrad( min(r_t, 1 + high) ) A_i log pi_theta(t)

A_i is GRPO's. A clipped surrogate gives a clipped token no gradient at all. Here the weight is bounded
instead, so every token has a gradient. We decided to bound the weight from above only, as both papers,
TRL and Liger do (verl bounds it from below as well). The bound is 1 + clip_high, as everywhere in
Headrace, and is 5 by default. TRL's epsilon_high is the bound itself.
"""

import torch

from trainer.grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and whether its weight is bounded (M, bool)."""
    most = 1 + hyperparameters.clip_high
    ratio_M = actions.log_ratio_M.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_M = -ratio_M.clamp(max=most) * actions.advantage_M * actions.logprob_M
    return loss_M, ratio_M > most


OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(clip_high=4.0, aggregation="token_mean"),
)
