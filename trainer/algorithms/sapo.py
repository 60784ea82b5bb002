"""SAPO: soft adaptive policy optimization (arXiv 2511.20347).

    f(r) = (4 / tau) sigmoid(tau (r - 1))          tau = tau_pos where A_i > 0, and tau_neg elsewhere
    loss = - (1 / S) sum_i (1 / len_i) sum_t f(r_t) A_i

A_i is GRPO's. A clip takes the gradient of a token away at once. Here it fades: f has slope 1 at r = 1,
and less the further r is from 1. It fades sooner where the advantage is negative (tau 1.05 against 1, as
in the paper, TRL and verl), because such a step raises the probability of many other tokens.
"""

import torch

from trainer.grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and which actions are clipped (M, bool), which is none."""
    ratio_M = actions.log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    rises_M = actions.advantage_M > 0
    tau_pos, tau_neg = ratio_M.new_tensor([hyperparameters.tau_pos, hyperparameters.tau_neg])
    tau_M = torch.where(rises_M, tau_pos, tau_neg)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    return -gate_M * actions.advantage_M, torch.zeros_like(rises_M)


OBJECTIVE = Objective(estimate=by_group(advantages), loss=loss, defaults=Hyperparameters())
