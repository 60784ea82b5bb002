"""RLOO: REINFORCE leave-one-out (arXiv 2402.14740).

    A_i  = R_i - mean_{j != i} R_j  =  (R_i - mean_G R) G / (G - 1)
    loss = - (1 / (S L)) sum_i sum_t min(r_t A_i, clip(r_t) A_i)     L = max_response_length

The baseline does not contain the sample's own reward, so the estimate is unbiased. Tokens are
summed, not averaged: a sequence's log-probability is a sum, and a constant division leaves the
direction alone. Decided: the ratio is the token's and clipped as in PPO (verl; TRL clips the
sequence's). A group with a single reward has no others to compare with and gets exactly 0 (verl's
loop keeps the reward itself, its vectorised form gives 0).
"""

import math
from collections.abc import Sequence

from trainer.grpo import loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective, by_group, finite_or_none


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each sample of one group: exactly 0 where all rewards are equal."""
    known = [r for reward in rewards if (r := finite_or_none(reward)) is not None]
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    total, others = math.fsum(known), len(known) - 1
    return [
        0.0 if (r := finite_or_none(reward)) is None else r - (total - r) / others
        for reward in rewards
    ]


OBJECTIVE = Objective(
    estimate=by_group(advantages), loss=loss, defaults=Hyperparameters(aggregation="constant")
)
