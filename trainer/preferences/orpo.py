"""ORPO: monolithic preference optimization without a reference model (arXiv 2403.07691).

    p_i  = exp((1 / len_i) log pi(y_i|x))               the geometric mean of an answer's tokens
    odds = p / (1 - p)
    loss = mean over pairs of
           - (1 / len_c) log pi(y_chosen|x)  -  beta log sigmoid(log odds_chosen - log odds_rejected)

beta is the paper's lambda. The first term is supervised learning of the chosen answer. As in the paper,
it is a mean per answer, and over its answer alone. TRL and the authors' code learn the prompt too, and
take the mean over all tokens of the batch.
"""

import torch
import torch.nn.functional as F

from trainer.preferences.objective import (
    AnswerScores,
    PreferenceObjective,
    PreferenceSettings,
    pair_difference,
)

LARGEST = -1e-9
"""The largest mean log-probability whose odds are computed. Those of a certain answer are infinite."""


def loss(scores: AnswerScores, settings: PreferenceSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (U) of each pair, and the reward (A) of each answer."""
    mean_A = scores.mean_logprob_A
    bounded_A = mean_A.clamp(max=LARGEST)
    log_odds_A = bounded_A - torch.log(-torch.expm1(bounded_A))
    ratio_U = F.logsigmoid(pair_difference(log_odds_A))
    return -mean_A[0::2] - settings.beta * ratio_U, settings.beta * mean_A


OBJECTIVE = PreferenceObjective(
    loss=loss, defaults=PreferenceSettings(beta=0.1), has_reference=False
)
