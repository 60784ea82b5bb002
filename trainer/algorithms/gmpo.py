"""GMPO: geometric-mean policy optimization (arXiv 2507.20673).

    d_t  = min(log r_t, clip(log r_t, -low, high))     where A_i > 0, and max(...) elsewhere
    loss = - (1 / S) sum_i exp( mean_t d_t ) A_i

A_i is GRPO's. Like GSPO it takes the geometric mean of a sequence's ratios, but it clips each of them
before, so one token far away does not take the gradient of the whole sequence. Both clips are those of
the log-ratio, 0.4 as in the paper, so a ratio stays between exp(-0.4) and exp(0.4). A sequence is a
training row (`trainer/objective/sequences.py`). Log-ratios are clamped to +-20, as everywhere in
Headrace (verl does not clamp them here).
"""

import torch

from trainer.grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, which is that of its sequence, and whether its own ratio is clipped
    (M, bool)."""
    free_M = actions.log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bound_M = free_M.clamp(-hyperparameters.clip_low, hyperparameters.clip_high)
    clipped_M = torch.where(
        actions.advantage_M > 0, torch.minimum(free_M, bound_M), torch.maximum(free_M, bound_M)
    )
    ratio_M = actions.rows.mean(clipped_M).exp()
    return -ratio_M * actions.advantage_M, clipped_M != free_M


OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(clip_low=0.4, clip_high=0.4),
)
