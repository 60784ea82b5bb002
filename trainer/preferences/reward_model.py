"""A reward model: Bradley-Terry on the scores of whole answers (arXiv 1706.03741, 2009.01325).

    r_i  = w . h_i                      h: the last hidden state at the token that ends the answer's turn
    loss = mean over pairs of
           - log sigmoid(r_chosen - r_rejected - m)  +  c (r_chosen + r_rejected)^2

m is the row's `margin` (arXiv 2307.09288), 0 without one, and c is center_rewards_coefficient (arXiv
2312.09244), which keeps the rewards near 0: the first term fixes only their difference. The adapter
and the head (`trainer/model/scalar_heads.py`) are trained together. As in TRL, a pair with an answer
that is longer than max_sequence_length is not learned, because its last token would not be the end of a
turn.
"""

import torch
import torch.nn.functional as F

from trainer.preferences.objective import (
    AnswerScores,
    PreferenceObjective,
    PreferenceSettings,
    pair_difference,
)


def loss(scores: AnswerScores, settings: PreferenceSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (U) of each pair, and the reward (A) of each answer. Raises ValueError without the scores
    of a head."""
    reward_A, margin_U = scores.score_A, scores.margin_U
    if reward_A is None or margin_U is None:
        raise ValueError("a reward model needs the scores of its head, and a margin for each pair")
    loss_U = -F.logsigmoid(pair_difference(reward_A) - margin_U)
    centred_U = (reward_A[0::2] + reward_A[1::2]) ** 2
    return loss_U + settings.center_rewards_coefficient * centred_U, reward_A


OBJECTIVE = PreferenceObjective(
    loss=loss, defaults=PreferenceSettings(), has_reference=False, has_head=True
)
