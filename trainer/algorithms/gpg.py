"""GPG: group policy gradient (arXiv 2504.02546).

    A_i  = alpha (R_i - mean_G R)                       alpha = samples / samples of groups that differ
    loss = - (1 / sum_i len_i) sum_i sum_t A_i log pi_theta(t)

It has neither ratio, clip nor std. A group whose rewards are all equal teaches nothing, and alpha makes
up for it, so that the gradient does not shrink as more questions are solved. We decided to count those
samples, as the paper does. verl divides by the number of rewards that are not 0, which is not the same.
Samples without a finite reward count on neither side. Without a ratio the gradient is that of samples of
the policy itself, so in the asynchronous modes, and with several updates, set `correction`.
"""

import torch

from trainer.algorithms.dr_grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import (
    Actions,
    BatchBeforeUpdate,
    Estimate,
    Objective,
    by_group,
)


def estimate(before: BatchBeforeUpdate, hyperparameters: Hyperparameters) -> Estimate:
    """The advantage of each action (E)."""
    centred = by_group(advantages)(before, hyperparameters)
    return Estimate(centred.advantage_E * alpha(before))


def alpha(before: BatchBeforeUpdate) -> float:
    """All samples with a reward, over those of groups whose rewards differ. 1 if there are none."""
    rewards: dict[int, list[float]] = {}
    for group, reward in zip(before.group_S, before.net_rewards(), strict=True):
        if reward is not None:
            rewards.setdefault(group, []).append(reward)
    differing = sum(len(known) for known in rewards.values() if min(known) < max(known))
    return sum(map(len, rewards.values())) / differing if differing else 1.0


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and which actions are clipped (M, bool), which is none."""
    loss_M = -actions.advantage_M * actions.logprob_M
    return loss_M, torch.zeros_like(loss_M, dtype=torch.bool)


OBJECTIVE = Objective(
    estimate=estimate, loss=loss, defaults=Hyperparameters(aggregation="token_mean")
)
