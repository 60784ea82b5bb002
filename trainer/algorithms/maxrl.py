"""MaxRL: maximum likelihood reinforcement learning (arXiv 2602.02710).

    A_i  = (R_i - mean_G R) / mean_G R                  0 unless the mean is positive
    loss = GRPO's

With rewards of 0 and 1, the expected gradient of G samples is that of the first G terms of the series of
log p, where p is the share of right answers. Plain reinforcement learning has the first term alone. So
questions that are seldom solved count more, about 1 / p. Rewards must not be negative: a mean that is
not positive has no meaning here, and such a group gets 0. One that is hardly positive would make huge
advantages, so they are limited to G - 1 in size. No reward that is not negative reaches more.
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
    mean = math.fsum(known) / len(known) if known else 0.0
    if mean <= 0 or min(known) == max(known):
        return [0.0] * len(rewards)
    most = len(known) - 1.0
    return [
        0.0 if (r := finite_or_none(reward)) is None else max(-most, min(most, (r - mean) / mean))
        for reward in rewards
    ]


OBJECTIVE = Objective(estimate=by_group(advantages), loss=loss, defaults=Hyperparameters())
