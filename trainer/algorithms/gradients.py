"""Policy gradients without a step, to compare what two sets of rewards would teach.

    g(R) = d/d theta  L(theta; samples, R)        at the version that the step starts from
    cosine = <g(R), g(R')> / (|g(R)| |g(R')|)     over all trained tensors of the policy, in float64

It is the gradient of the first update of `grpo.step` on the whole batch, before it is clipped. The
algorithm's own objective is used, with its penalties and corrections. Nothing is changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.learner import GradedGroup, GradientComparison
from trainer.grpo import accumulate_gradients, prepare_batch
from trainer.objective.batch import examples_of, sample_of_each_action
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective
from trainer.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class PolicyGradient:
    """The gradient of each trained tensor by name, and the advantage of each sample: the sum over its
    actions, in float64."""

    tensors: dict[str, torch.Tensor]
    advantages: list[float]


def gradient(
    policy: Policy,
    groups: Sequence[GradedGroup],
    *,
    objective: Objective,
    hyperparameters: Hyperparameters,
) -> PolicyGradient:
    """Return the gradient of the loss of a batch. The policy has no gradients afterwards."""
    batch = prepare_batch(policy, groups, objective=objective, hyperparameters=hyperparameters)
    _clear(policy)
    try:
        accumulate_gradients(policy, batch)
        tensors = {
            name: tensor.grad.detach().double().cpu()
            for name, tensor in sorted(policy.tensors.items())
            if tensor.grad is not None
        }
    finally:
        _clear(policy)
    sample_E = sample_of_each_action(examples_of(groups))
    number = sum(len(group.samples) for group in groups)
    total_S = torch.zeros(number, dtype=torch.float64)
    total_S.index_add_(0, sample_E, batch.values_E["advantage"].double())
    return PolicyGradient(tensors, total_S.tolist())


def _clear(policy: Policy) -> None:
    critic = policy.critic.tensors if policy.critic is not None else {}
    for tensor in (*policy.tensors.values(), *critic.values()):
        tensor.grad = None


def compare_gradients(
    policy: Policy,
    batches: tuple[Sequence[GradedGroup], Sequence[GradedGroup]],
    *,
    objective: Objective,
    hyperparameters: Hyperparameters,
) -> GradientComparison:
    """Return how far the gradients of two batches agree, which differ in their rewards."""
    before, after = (
        gradient(policy, groups, objective=objective, hyperparameters=hyperparameters)
        for groups in batches
    )
    return compare(before, after)


def compare(before: PolicyGradient, after: PolicyGradient) -> GradientComparison:
    """Return how far two gradients of one version agree."""
    names = before.tensors.keys() & after.tensors.keys()
    dot = math.fsum(float((before.tensors[n] * after.tensors[n]).sum()) for n in sorted(names))
    squares = [
        math.fsum(float(tensor.square().sum()) for tensor in one.tensors.values())
        for one in (before, after)
    ]
    scale = math.sqrt(squares[0] * squares[1])
    signs = [(_sign(b), _sign(a)) for b, a in zip(before.advantages, after.advantages, strict=True)]
    counted = [(b, a) for b, a in signs if b or a]
    return GradientComparison(
        cosine=max(-1.0, min(1.0, dot / scale)) if scale > 0 else None,
        norm_before=math.sqrt(squares[0]),
        norm_after=math.sqrt(squares[1]),
        advantages=len(counted),
        turned=sum(b != a for b, a in counted),
    )


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
