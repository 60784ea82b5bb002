# ruff: noqa: N802, N815  shape suffixes name the axes of a tensor, in class scope too
"""An objective: a function from rewards to advantages, and a loss for each action.

Shape suffixes:
    E  all actions of the step in canonical order (slot, sample, row, position), so that the actions of
       a sample are neighbours
    M  the actions of one micro-batch, a slice of E
    S  samples

Everything known before the update is constant and float64. Only `logprob_M` carries a gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trainer.objective.covariance import MeasuredActions
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.sequences import Rows

ActionValues = dict[str, torch.Tensor]
"""The known values of each action before the update, by name. Each tensor has shape (E), or (M) for one
micro-batch. `weight` and `advantage` are always there. `proximal` (log pi_prox) and `kl` are there if
the run uses them, and `selected` (1 or 0) if the objective selects actions. With a critic there are also
`value` (V before the step), `return`, and `known` (1 where the sample has a reward, else 0)."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchBeforeUpdate:
    """The facts about a batch before its first update.

    `group_S` is the number of each sample's group. `reward_S` is None where a reward is missing or not
    finite. `sample_E` is the number of each action's sample. `penalty_E` is kl_coef times the KL
    estimate at each action, if the KL is part of the reward. `value_E` is what the critic predicts, if
    there is one. `parts` are the parts of each sample's reward by name, if the run records them. With
    `request_E` the requests of a sample have another order than its rows: the place among all actions of
    each action, sample by sample, in the order of the requests.
    """

    group_S: Sequence[int]
    reward_S: Sequence[float | None]
    sample_E: torch.Tensor
    penalty_E: torch.Tensor | None = None
    value_E: torch.Tensor | None = None
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    request_E: torch.Tensor | None = None

    def in_time(self, value_E: torch.Tensor) -> torch.Tensor:
        """(E): values of actions, each sample's in the order of its requests."""
        return value_E if self.request_E is None else value_E[self.request_E]

    def in_rows(self, value_E: torch.Tensor) -> torch.Tensor:
        """(E): values that are `in_time`, in the order of the rows again."""
        if self.request_E is None:
            return value_E
        return torch.empty_like(value_E).index_copy_(0, self.request_E, value_E)

    @property
    def known_E(self) -> torch.Tensor:
        """(E, bool): whether the sample of each action has a reward."""
        known_S = torch.tensor([reward is not None for reward in self.reward_S], dtype=torch.bool)
        return known_S[self.sample_E]

    def net_rewards(self) -> list[float | None]:
        """The reward of each sample, minus the KL penalties of all its actions. None where the sample
        has no reward."""
        if self.penalty_E is None:
            return list(self.reward_S)
        penalty_S = torch.zeros(len(self.reward_S), dtype=torch.float64)
        penalty_S.index_add_(0, self.sample_E, self.penalty_E)
        pairs = zip(self.reward_S, penalty_S.tolist(), strict=True)
        return [None if reward is None else reward - penalty for reward, penalty in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """The advantage of each action. With a critic also its return, which is what the critic should have
    predicted as its value."""

    advantage_E: torch.Tensor
    return_E: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The actions of a micro-batch under the policy being trained. `logprob_M` is log pi_theta, and
    `log_ratio_M` is `logprob_M` minus the log-probability that the ratio is taken against. Both carry a
    gradient. `selected_M` is what the objective selected before the first update, if it selects."""

    logprob_M: torch.Tensor
    log_ratio_M: torch.Tensor
    advantage_M: torch.Tensor
    rows: Rows
    selected_M: torch.Tensor | None = None

    def is_selected(self) -> torch.Tensor:
        """(M, bool): the actions that the objective selected."""
        if self.selected_M is None:
            return torch.zeros_like(self.advantage_M, dtype=torch.bool)
        return self.selected_M > 0


@dataclass(frozen=True, slots=True)
class Objective:
    """One algorithm. `estimate` turns rewards into advantages. `loss` returns the loss (M) of each
    action, and whether it was clipped (M, bool). `defaults` are its hyperparameters, and `with_baseline`
    those for `group_baseline = true`, if they differ. `select`, if there is one, chooses actions (E,
    bool) of the whole step before its first update."""

    estimate: Callable[[BatchBeforeUpdate, Hyperparameters], Estimate]
    loss: Callable[[Actions, Hyperparameters], tuple[torch.Tensor, torch.Tensor]]
    defaults: Hyperparameters
    has_critic: bool = False
    with_baseline: Hyperparameters | None = None
    select: Callable[[MeasuredActions, Hyperparameters], torch.Tensor] | None = None


def finite_or_none(reward: float | None) -> float | None:
    """The reward, or None if it is not finite. It is never turned into a reward of 0, which would be a
    statement about the sample."""
    return reward if reward is not None and math.isfinite(reward) else None


def by_group(
    advantages: Callable[[Sequence[float | None]], list[float]],
) -> Callable[[BatchBeforeUpdate, Hyperparameters], Estimate]:
    """Turn a function of the rewards of one group into an `Objective.estimate`. Each action of a sample
    gets the advantage of the sample. A KL penalty in the reward is summed over the sample first."""

    def estimate(before: BatchBeforeUpdate, hyperparameters: Hyperparameters) -> Estimate:
        advantage_S = compare_in_groups(advantages, before.group_S, before.net_rewards())
        return Estimate(torch.tensor(advantage_S, dtype=torch.float64)[before.sample_E])

    return estimate


def compare_in_groups(
    advantages: Callable[[Sequence[float | None]], list[float]],
    group_S: Sequence[int],
    reward_S: Sequence[float | None],
) -> list[float]:
    """The advantage of each sample, by a function of the rewards of one group."""
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(group_S):
        members.setdefault(group, []).append(sample)
    advantage_S = [0.0] * len(group_S)
    for samples in members.values():
        of_group = advantages([reward_S[i] for i in samples])
        for sample, advantage in zip(samples, of_group, strict=True):
            advantage_S[sample] = advantage
    return advantage_S


def whiten(value_E: torch.Tensor, known_E: torch.Tensor) -> torch.Tensor:
    """Values (E) shifted and scaled to mean 0 and standard deviation 1 over the known actions (ddof 1,
    with 1e-8 added to the variance under the root). The other actions get 0. If all known values are
    equal, every action gets 0."""
    known = value_E[known_E]
    white_E = torch.zeros_like(value_E)
    if len(known) < 2 or known.min() == known.max():
        return white_E
    white_E[known_E] = (known - known.mean()) * torch.rsqrt(known.var() + 1e-8)
    return white_E
