"""GSPO: group sequence policy optimization (arXiv 2507.18071).

    s_i  = exp( mean_t log r_t )                     the geometric mean over the sequence
    loss = - (1 / S) sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

A_i is GRPO's. A sequence has one ratio, and it is clipped as a whole. A mean over tokens varies far less
than the log-ratio of a single token, so the clip is narrow: 3e-4 and 4e-4, as in the paper. We decided
to take the mean over sequences, as in the paper and TRL (verl offers other means, and so does
loss_aggregation here). A sequence is a training row (`trainer/objective/sequences.py`). log s_i is
clamped to +-20 before exp (verl: 10).
"""

import torch

from trainer.grpo import advantages, clipped_loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Actions, Objective, by_group


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and whether it is clipped (M, bool). Both are those of its sequence,
    and so the same for all actions in it."""
    return clipped_loss(
        actions.rows.mean(actions.log_ratio_M),
        actions.advantage_M,
        low=hyperparameters.clip_low,
        high=hyperparameters.clip_high,
        delta=hyperparameters.clip_delta,
    )


OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(clip_low=3e-4, clip_high=4e-4),
)
