"""Dr. GRPO: GRPO done right (arXiv 2503.20783).

    A_i  = R_i - mean_G R                                           no division by the std
    loss = - (1 / (S L)) sum_i sum_t min(r_t A_i, clip(r_t) A_i)    L = max_response_length

Dividing by the std favours questions that are nearly always or nearly never answered. Dividing by len_i
favours short right answers and long wrong ones. Both divisions are removed, and the sum over tokens is
divided by a constant. A group with a single reward gets exactly 0.
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
    mean = math.fsum(known) / len(known)
    return [0.0 if (r := finite_or_none(reward)) is None else r - mean for reward in rewards]


OBJECTIVE = Objective(
    estimate=by_group(advantages), loss=loss, defaults=Hyperparameters(aggregation="constant")
)
