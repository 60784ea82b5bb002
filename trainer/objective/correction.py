"""Off-policy correction: decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298), and its truncated
and masked forms.

There are three policies. mu is the one that sampled, pi_prox is the policy before the first update of
the step, and pi_theta is being trained. The ratio is taken against pi_prox, and a constant weight w
corrects for the difference between mu and pi_prox:

    loss = - w min(r A, clip(r) A),   r = pi_theta / pi_prox,   w = pi_prox / mu  (no gradient)

    decoupled   w unchanged
    truncated   min(w, high)                    TIS (V-trace, arXiv 1802.01561; high about 2)
    masked      w where low <= w <= high, else 0          masked IS, IcePop (arXiv 2510.18855)

    token       w_t, one per action
    sequence    prod_t w_t over the sequence: unbiased, but outside any window on long answers
    geometric   exp(mean_t log w_t)

The first table is `correction`, and the second is `correction_level`, which says what one weight belongs
to. With `correction = "ratio"`, the default, none of this is used. The ratio itself is taken against mu,
and multiplying by w as well would count the same difference twice. With one update per step r is 1 in
value, and the clip never binds. The log of w is clamped to +-20 before exp. The metric
`train/corrected_ratio` is the share of actions whose weight was bounded or set to 0. Watch it, because a
window at sequence level rejects almost every long answer.
"""

import torch

from schemas.config import CorrectionLevel
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.metrics import Means
from trainer.objective.objective import Actions
from trainer.objective.sequence_mask import keep_mask
from trainer.objective.sequences import Rows


def apply_off_policy_correction(
    loss_M: torch.Tensor,
    actions: Actions,
    behaviour_M: torch.Tensor,
    proximal_M: torch.Tensor,
    hyperparameters: Hyperparameters,
    means: Means,
) -> torch.Tensor:
    """Multiply the surrogate loss (M) by the off-policy sequence mask
    (`trainer/objective/sequence_mask.py`) and by the weight w, if the run uses them. Returns the loss
    (M), unchanged if it uses neither. Adds the metrics of both to `means`."""
    if hyperparameters.off_policy_threshold is not None:
        keep_M = keep_mask(
            behaviour_M,
            actions.logprob_M,
            actions.advantage_M,
            actions.rows,
            threshold=hyperparameters.off_policy_threshold,
        )
        means.add("train/off_policy_ratio", ~keep_M)
        loss_M = loss_M * keep_M
    if hyperparameters.correction != "ratio":
        weight_M, touched_M = importance_weights(
            proximal_M - behaviour_M, actions.rows, hyperparameters
        )
        means.add("train/importance_weight", weight_M)
        means.add("train/corrected_ratio", touched_M)
        loss_M = loss_M * weight_M
    return loss_M


def importance_weights(
    log_weight_M: torch.Tensor, rows: Rows, hyperparameters: Hyperparameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight w (M, no gradient) of each action, and whether it was bounded or set to 0 (M, bool).
    `log_weight_M` is log pi_prox - log mu."""
    raw_M = weights_at_level(log_weight_M.detach(), rows, hyperparameters.correction_level)
    weight_M = raw_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = hyperparameters.correction_low, hyperparameters.correction_high
    if hyperparameters.correction == "truncated":
        return weight_M.clamp(max=high), weight_M > high
    if hyperparameters.correction == "masked":
        outside_M = (weight_M < low) | (weight_M > high)
        return weight_M.masked_fill(outside_M, 0.0), outside_M
    return weight_M, torch.zeros_like(weight_M, dtype=torch.bool)


def weights_at_level(
    log_weight_M: torch.Tensor, rows: Rows, which: CorrectionLevel
) -> torch.Tensor:
    """Log-weights (M) at the level `which`: token, sequence or geometric. At the last two, all actions
    of a row get the same value."""
    if which == "sequence":
        return rows.sum(log_weight_M)
    return rows.mean(log_weight_M) if which == "geometric" else log_weight_M
