# ruff: noqa: N802, N815  shape suffixes name the axes of a tensor, in class scope too
"""A preference objective: a loss for each pair of answers, or for each answer.

Shape suffixes:
    A  the answers of a micro-batch. Where the objective is paired, those of a pair are neighbours, and
       the chosen one comes first
    U  what the loss is averaged over: pairs if the objective is paired, else answers

`reward_A` is the number by which an objective compares answers. It carries no gradient in metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from schemas.config import PreferenceLoss


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """The hyperparameters of a run that learns from preferences. docs/config.md explains the keys."""

    beta: float = 0.1
    loss: PreferenceLoss = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_rewards_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AnswerScores:
    """The scores of the answers of a micro-batch, (A) each. `logprob_A` is the sum of the
    log-probabilities of an answer's tokens under the policy. It alone carries a gradient. `reference_A`
    is the same under the reference, and 0 where the objective has none. `length_A` counts the tokens.
    `baseline` is KTO's estimate of how far the policy has moved from the reference.

    Where the objective has a score head, `score_A` is what the head says, which carries a gradient, and
    the log-probabilities are 0. `margin_U` is by how much the rewards of a pair should differ."""

    logprob_A: torch.Tensor
    reference_A: torch.Tensor
    length_A: torch.Tensor
    is_chosen_A: torch.Tensor
    baseline: float = 0.0
    score_A: torch.Tensor | None = None
    margin_U: torch.Tensor | None = None

    @property
    def log_ratio_A(self) -> torch.Tensor:
        """(A): log pi(y|x) - log pi_ref(y|x)."""
        return self.logprob_A - self.reference_A

    @property
    def mean_logprob_A(self) -> torch.Tensor:
        """(A): the mean log-probability of an answer's tokens."""
        return self.logprob_A / self.length_A


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """`loss` returns the loss (U) of each pair or answer, and the reward (A) of each answer. With
    `from_groups` the pairs are samples of the policy, else rows of a dataset."""

    loss: Callable[[AnswerScores, PreferenceSettings], tuple[torch.Tensor, torch.Tensor]]
    defaults: PreferenceSettings
    is_paired: bool = True
    has_reference: bool = True
    has_baseline: bool = False
    from_groups: bool = False
    has_head: bool = False


def pair_difference(value_A: torch.Tensor) -> torch.Tensor:
    """(U): the value of the chosen answer of each pair minus that of the rejected one."""
    return value_A[0::2] - value_A[1::2]
