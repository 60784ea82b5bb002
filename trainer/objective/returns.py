"""Sums along the trajectory of a sample: its reward at the last action, next values, discounted sums.

A trajectory consists of all actions of a sample, over all its rows in the order of their first requests
(`BatchBeforeUpdate.in_time`), so that the last action is one of the last row. Tokens in between that the
policy did not choose are not steps of the trajectory, so nothing is discounted or estimated there. The
value after the last action is 0. That also holds when the answer was cut at the length limit, because
its reward counts like any other. Values have shape (E) (`trainer/objective/objective.py`), where the
actions of a sample are neighbours. Sums are computed in float64, one time step after the other, for all
samples at once.
"""

from collections.abc import Sequence

import torch


def is_last(sample_E: torch.Tensor) -> torch.Tensor:
    """(E, bool): whether an action is the last one of its sample."""
    last_E = torch.ones_like(sample_E, dtype=torch.bool)
    last_E[:-1] = sample_E[1:] != sample_E[:-1]
    return last_E


def reward_at_last_action(reward_S: Sequence[float | None], sample_E: torch.Tensor) -> torch.Tensor:
    """(E): the reward of the sample at its last action, and 0 elsewhere. A sample without a reward has 0
    everywhere."""
    value_S = torch.tensor([reward or 0.0 for reward in reward_S], dtype=torch.float64)
    return value_S[sample_E] * is_last(sample_E)


def next_values(value_E: torch.Tensor, sample_E: torch.Tensor) -> torch.Tensor:
    """(E): the value at the next action of the sample. 0 at its last action."""
    next_E = torch.zeros_like(value_E)
    next_E[:-1] = value_E[1:]
    return next_E.masked_fill(is_last(sample_E), 0.0)


def discounted_sums(
    value_E: torch.Tensor, sample_E: torch.Tensor, *, factor: float
) -> torch.Tensor:
    """(E): sum_{k >= 0} factor^k value_{t+k}, over the remaining actions of the sample."""
    if not len(value_E):
        return value_E
    _, sample_of_E, count_S = sample_E.unique_consecutive(return_inverse=True, return_counts=True)
    first_S = count_S.cumsum(0) - count_S
    step_E = torch.arange(len(value_E)) - first_S[sample_of_E]
    table_S_T = value_E.new_zeros(len(count_S), int(count_S.max()))
    table_S_T[sample_of_E, step_E] = value_E
    for t in range(table_S_T.shape[1] - 2, -1, -1):
        table_S_T[:, t] += factor * table_S_T[:, t + 1]
    return table_S_T[sample_of_E, step_E]
