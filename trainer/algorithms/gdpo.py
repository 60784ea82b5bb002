"""GDPO: group reward-decoupled normalization policy optimization (NVIDIA, arXiv 2601.05242).

    a_ik = (R_ik - mean_G R_k) / (std_G R_k + eps)          per group, for each part k of the reward
    s_i  = sum_k w_k a_ik
    A_i  = (s_i - mean s) / (std s + eps)                   over all samples of the step
    loss = GRPO's

A part is the value of one reward function, rubric or reward model, and w_k is its weight. GRPO adds the
parts first.
Then different combinations of parts have the same advantage, and a part with a large spread drowns the
others. Here each part has the same spread before it is weighed.

We decided to normalise s over samples, as the paper and TRL do. verl does it over tokens, so that long
answers count more. ddof = 1 and eps = 1e-6 in both places (TRL: 1e-4). A part that is equal in a whole
group adds exactly 0 there. A sample without a finite reward is in no mean and gets 0.
"""

import torch

from schemas.errors import CorruptData
from trainer.grpo import advantages, loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import (
    BatchBeforeUpdate,
    Estimate,
    Objective,
    compare_in_groups,
    finite_or_none,
)


def estimate(before: BatchBeforeUpdate, hyperparameters: Hyperparameters) -> Estimate:
    """The advantage of each action (E). Raises CorruptData when the batch lacks a part."""
    sums: list[float | None] = [None if reward is None else 0.0 for reward in before.reward_S]
    for name, weight in hyperparameters.part_weights:
        part_S = before.parts.get(name)
        if part_S is None:
            known = ", ".join(before.parts) or "none"
            raise CorruptData(f"the batch has no part {name!r} of the rewards; it has: {known}")
        usable = [
            None if total is None else finite_or_none(part)
            for total, part in zip(sums, part_S, strict=True)
        ]
        normalised = compare_in_groups(advantages, before.group_S, usable)
        sums = [
            None if total is None or part is None else total + weight * advantage
            for total, part, advantage in zip(sums, usable, normalised, strict=True)
        ]
    advantage_S = advantages(sums)
    return Estimate(torch.tensor(advantage_S, dtype=torch.float64)[before.sample_E])


OBJECTIVE = Objective(estimate=estimate, loss=loss, defaults=Hyperparameters())
