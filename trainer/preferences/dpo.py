"""DPO: direct preference optimization (arXiv 2305.18290), and losses of the same difference.

    h_i  = log pi(y_i|x) - log pi_ref(y_i|x)           a sum over the tokens of an answer
    h    = h_chosen - h_rejected
    loss = mean over pairs of
           - log sigmoid(beta h)                        preference_loss = "sigmoid"
           - log sigmoid(beta h)   with h_i / len_i     "sigmoid_norm"
           (h - 1 / (2 beta))^2    with h_i / len_i     "ipo"       arXiv 2310.12036
           max(0, 1 - beta h)                           "hinge"     arXiv 2305.10425

The names are those of TRL. The reference is the base model without the trained tensors. No gradient
flows through it. IPO divides by the length although its paper does not say so: TRL reports that its
authors did. `label_smoothing` e mixes in the loss of the flipped pair, (1 - e) and e (cDPO). TRL 1.16
has it in its CPO trainer only.
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
    """The loss (U) of each pair, and the implicit reward (A) of each answer."""
    ratio_A, beta = scores.log_ratio_A, settings.beta
    if settings.loss in ("sigmoid_norm", "ipo"):
        ratio_A = ratio_A / scores.length_A
    h_U = pair_difference(ratio_A)
    if settings.loss == "ipo":
        return (h_U - 1 / (2 * beta)).square(), beta * ratio_A
    if settings.loss == "hinge":
        return torch.relu(1 - beta * h_U), beta * ratio_A
    return smoothed_loss(beta * h_U, settings.label_smoothing), beta * ratio_A


def smoothed_loss(margin_U: torch.Tensor, smoothing: float) -> torch.Tensor:
    """- log sigmoid (U) of the margins, and `smoothing` of it of the flipped margins."""
    return -F.logsigmoid(margin_U) * (1 - smoothing) - F.logsigmoid(-margin_U) * smoothing


OBJECTIVE = PreferenceObjective(loss=loss, defaults=PreferenceSettings(beta=0.1))
