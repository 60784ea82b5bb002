"""RLOO: REINFORCE leave-one-out (arXiv 2402.14740).

    A_i  = R_i - mean_{j != i} R_j  =  (R_i - mean_G R) G / (G - 1)
    loss = - (1 / (S L)) sum_i sum_t min(r_t A_i, clip(r_t) A_i)     L = max_response_length

The baseline does not contain the sample's own reward, so the estimate is unbiased. Tokens are summed
and not averaged, because the log-probability of a sequence is a sum. Dividing by a constant does not
change the direction. We decided to take the ratio per token and to clip it as in PPO (as verl does; TRL
clips the ratio of the sequence). A group with a single reward has nothing to compare it with and gets
exactly 0 (verl's loop keeps the reward itself, and its vectorised form gives 0).
"""

import math
from collections.abc import Sequence

from trainer.grpo import loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective, by_group, finite_or_none


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each sample of one group. It is exactly 0 if all rewards are equal, and for a
    sample without a finite reward."""
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
