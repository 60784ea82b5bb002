"""KTO: Kahneman-Tversky optimization (arXiv 2402.01306).

    h_i  = log pi(y_i|x) - log pi_ref(y_i|x)           a sum over the tokens of an answer
    z    = max(0, mean_i [log pi(y'_i|x_i) - log pi_ref(y'_i|x_i)])
    loss = mean over answers of   w_d (1 - sigmoid(beta (h_i - z)))     if y_i is desirable
                                  w_u (1 - sigmoid(beta (z - h_i)))     if it is not

y'_i is the answer of another row of the step, so z estimates KL(pi || pi_ref) for unrelated answers. It
is a constant: no gradient flows through it. As in TRL, the answers are rotated by one row. z and the
mean are those of the whole optimizer step, where TRL takes those of a micro-batch. A row of a pair is
one desirable and one undesirable answer.
"""

import torch

from trainer.preferences.objective import AnswerScores, PreferenceObjective, PreferenceSettings


def loss(scores: AnswerScores, settings: PreferenceSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (U = A) of each answer, and its implicit reward (A)."""
    reward_A, beta = settings.beta * scores.log_ratio_A, settings.beta
    good_A = settings.desirable_weight * (1 - torch.sigmoid(reward_A - beta * scores.baseline))
    bad_A = settings.undesirable_weight * (1 - torch.sigmoid(beta * scores.baseline - reward_A))
    return torch.where(scores.is_chosen_A, good_A, bad_A), reward_A


OBJECTIVE = PreferenceObjective(
    loss=loss,
    defaults=PreferenceSettings(beta=0.1),
    is_paired=False,
    has_baseline=True,
)
