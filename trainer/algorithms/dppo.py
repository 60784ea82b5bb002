"""DPPO: divergence proximal policy optimization (arXiv 2602.04879).

    loss = - (1 / sum_i len_i) sum_i sum_t m_t stopgrad( min(r_t, 20) ) A_i log pi_theta(t)
    m_t  = 0 where a step would widen a divergence that is too large already, else 1: where A_i > 0 and
           pi(t) > mu(t) and D_t > high, and where A_i < 0 and pi(t) < mu(t) and D_t > low
    D_t  = | pi(t) - mu(t) |                                                          divergence = "tv"
         = mu(t) log(mu(t) / pi(t)) + (1 - mu(t)) log((1 - mu(t)) / (1 - pi(t)))      divergence = "kl"

A_i is GRPO's. A clip of the ratio holds back a token of probability 0.001 that becomes 0.002, and lets
one of 0.99 become 0.8. DPPO bounds how far the distributions are apart, of which it sees the sampled
token and all others together. `clip_low` and `clip_high` are the bounds of D, by default 0.2 as in verl.
The weight is bounded at 20, which is verl's value too.
"""

import torch

from trainer.grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group

MOST = 20.0
SMALLEST = 1e-8
"""Added to the probability of all other tokens, of which there may be nothing left (verl's value)."""


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and whether it is masked (M, bool). A masked action has no
    gradient."""
    log_ratio_M = actions.log_ratio_M.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    now_M = actions.logprob_M.detach()
    before_M = now_M - actions.log_ratio_M.detach()
    apart_M = divergence(now_M, before_M, hyperparameters)
    rises_M = actions.advantage_M > 0
    is_masked_M = torch.where(
        rises_M,
        (now_M > before_M) & (apart_M > hyperparameters.clip_high),
        (now_M < before_M) & (apart_M > hyperparameters.clip_low),
    )
    weight_M = log_ratio_M.exp().clamp(max=MOST) * ~is_masked_M
    return -weight_M * actions.advantage_M * actions.logprob_M, is_masked_M


def divergence(
    now_M: torch.Tensor, before_M: torch.Tensor, hyperparameters: Hyperparameters
) -> torch.Tensor:
    """(M): how far apart two policies are that give the sampled token these log-probabilities (M)."""
    new_M, old_M = now_M.exp(), before_M.exp()
    if hyperparameters.divergence == "tv":
        return (new_M - old_M).abs()
    others_M = ((1 - old_M + SMALLEST) / (1 - new_M + SMALLEST)).log()
    return old_M * (before_M - now_M) + (1 - old_M) * others_M


OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(aggregation="token_mean"),
)
