"""KL-Cov: a KL penalty on the actions that lower the entropy most (arXiv 2505.22617).

    loss = - (1 / sum_i len_i) sum_i sum_t (r_t A_i - m_t beta | log r_t |)
    m_t  = 1 for the share `cov_ratio` of all actions with the largest Cov_t, as far as it is positive

A_i is GRPO's, and Cov is in `trainer/objective/covariance.py`. beta is `cov_kl_coef`. The ratio is not
clipped. | log r_t | is the authors' estimate of the KL of the two policies at this action. Its slope
is 0 where the ratio is exactly 1.

We decided to choose once for the whole step, before its first update, as the paper describes it. verl
chooses in each micro-batch, and at least one action in each. We never choose an action without a
positive Cov. In a step whose rewards are all equal that would be any action. Of equal ones the earlier
in the step comes first.
"""

import torch

from trainer.grpo import advantages
from trainer.objective.covariance import MeasuredActions, choose_first, covariances
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group


def select(actions: MeasuredActions, hyperparameters: Hyperparameters) -> torch.Tensor:
    """(E, bool): the actions that get the penalty."""
    cov_E = covariances(actions)
    order = cov_E.argsort(descending=True, stable=True)
    return choose_first(order, actions, hyperparameters.cov_ratio) & (cov_E > 0)


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and whether it has the penalty (M, bool)."""
    ratio_M = actions.log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    chosen_M = actions.is_selected()
    penalty_M = hyperparameters.cov_kl_coef * actions.log_ratio_M.abs()
    return -ratio_M * actions.advantage_M + penalty_M * chosen_M, chosen_M


OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(aggregation="token_mean"),
    select=select,
)
