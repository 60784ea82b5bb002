# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Which actions lower the entropy of the policy most (arXiv 2505.22617).

    Cov_t = (A_t - mean A) (log pi(t) - mean log pi)           over all actions of the step

An action that is likely already and has a high advantage makes the policy surer of itself. The mean of
Cov is the covariance of advantage and log-probability, and the entropy falls in proportion to it.

Means and choice are those of the whole step, with the policy before its first update. A choice in each
micro-batch would depend on how the step is packed. Actions that do not count (of a sample without a
reward, or that is masked) are in no mean and are never chosen.

The shape suffix E is explained in `trainer/objective/objective.py`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredActions:
    """The actions of a step before its first update. `log_ratio_E` is `logprob_E` minus the
    log-probability that the ratio is taken against. `counts_E` (bool) says which of them count."""

    logprob_E: torch.Tensor
    log_ratio_E: torch.Tensor
    advantage_E: torch.Tensor
    counts_E: torch.Tensor


def covariances(actions: MeasuredActions) -> torch.Tensor:
    """Cov (E) of each action, and -inf for one that does not count."""
    advantage_E, logprob_E = (
        value_E - value_E[actions.counts_E].mean()
        for value_E in (actions.advantage_E, actions.logprob_E)
    )
    return (advantage_E * logprob_E).masked_fill(~actions.counts_E, -torch.inf)


def choose_first(order: torch.Tensor, actions: MeasuredActions, share: float) -> torch.Tensor:
    """(E, bool): the first actions of `order`, as many as `share` of those that count, but at least
    one."""
    most = max(1, int(share * int(actions.counts_E.sum())))
    chosen_E = torch.zeros_like(actions.counts_E)
    chosen_E[order[:most]] = True
    return chosen_E
