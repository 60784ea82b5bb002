"""SimPO: simple preference optimization with a reference-free reward (arXiv 2405.14734).

    p_i  = (1 / len_i) log pi(y_i|x)
    loss = - mean over pairs of  log sigmoid(beta (p_chosen - p_rejected) - gamma)

`simpo_gamma` is gamma, the margin that a pair should have. The mean over the tokens keeps long answers
from winning by their length. There is no reference, so nothing holds the policy near the base model:
use a small learning rate. beta is 2 and gamma 0.5, the authors' defaults.
"""

import torch

from trainer.preferences.dpo import smoothed_loss
from trainer.preferences.objective import (
    AnswerScores,
    PreferenceObjective,
    PreferenceSettings,
    pair_difference,
)


def loss(scores: AnswerScores, settings: PreferenceSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (U) of each pair, and the reward (A) of each answer."""
    reward_A = settings.beta * scores.mean_logprob_A
    margin_U = pair_difference(reward_A) - settings.simpo_gamma
    return smoothed_loss(margin_U, 0.0), reward_A


OBJECTIVE = PreferenceObjective(
    loss=loss, defaults=PreferenceSettings(beta=2.0, simpo_gamma=0.5), has_reference=False
)
