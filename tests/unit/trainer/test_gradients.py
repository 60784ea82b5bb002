"""Two policy gradients of one version agree exactly where the rewards teach the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.algorithms import COMPARES_PARTS, GROUPED, PAIRS_OF_GROUPS
from schemas.config import Algorithm
from schemas.events.regrades.figures import sides_of
from schemas.learner import GradedGroup, GradientComparison
from tests.unit.trainer.batches import GROUPS, group, policy64
from trainer import grpo
from trainer.algorithms.gradients import compare, compare_gradients, gradient
from trainer.algorithms.registry import OBJECTIVES
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate

HYPERPARAMETERS = Hyperparameters(max_response_length=8)
FLAT = tuple(group(n, (0.5, 0.5, 0.5)) for n in range(2))
BEFORE = tuple(group(n, (1.0, 0.0, 0.25)) for n in range(2))
NEGATED = tuple(group(n, (-1.0, 0.0, -0.25)) for n in range(2))
OTHER = tuple(group(n, (0.0, 1.0, 0.25)) for n in range(2))


def compared(
    before: tuple[GradedGroup, ...],
    after: tuple[GradedGroup, ...],
    hyperparameters: Hyperparameters = HYPERPARAMETERS,
) -> GradientComparison:
    return compare_gradients(
        policy64(), (before, after), objective=grpo.OBJECTIVE, hyperparameters=hyperparameters
    )


def test_equal_rewards_have_the_cosine_1_and_no_other_signs() -> None:
    found = compared(BEFORE, BEFORE)
    assert (found.cosine, found.advantages, found.turned) == (1.0, 6, 0)
    assert found.norm_before == found.norm_after > 0


def test_negated_advantages_have_the_cosine_minus_1() -> None:
    """Without clipping, whose bounds are not the same on both sides of an advantage."""
    wide = Hyperparameters(max_response_length=8, clip_low=1.0, clip_high=1e9)
    found = compared(BEFORE, NEGATED, wide)
    assert found.cosine == pytest.approx(-1.0, abs=1e-12)
    assert (found.advantages, found.turned) == (6, 6)


def test_other_rewards_lie_between_and_rewards_without_differences_have_no_angle() -> None:
    found = compared(BEFORE, OTHER)
    assert found.cosine is not None
    assert -1 < found.cosine < 1
    flat = compared(BEFORE, FLAT)
    assert (flat.cosine, flat.norm_after) == (None, 0.0)


def test_a_gradient_is_that_of_a_step_and_leaves_nothing_behind() -> None:
    policy = policy64()
    before = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
    found = gradient(policy, GROUPS, objective=grpo.OBJECTIVE, hyperparameters=HYPERPARAMETERS)
    assert all(tensor.grad is None for tensor in policy.tensors.values())
    assert all(torch.equal(before[name], policy.tensors[name]) for name in before)
    batch = grpo.prepare_batch(
        policy, GROUPS, objective=grpo.OBJECTIVE, hyperparameters=HYPERPARAMETERS
    )
    grpo.accumulate_gradients(policy, batch)
    for name, tensor in policy.tensors.items():
        assert tensor.grad is not None
        assert torch.equal(found.tensors[name], tensor.grad)
    assert compare(found, found).cosine == 1.0


REWARDS = st.lists(st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=2, max_size=6)


@pytest.mark.parametrize(
    "algorithm", [n for n in GROUPED if n not in (*COMPARES_PARTS, *PAIRS_OF_GROUPS)]
)
@given(rewards=REWARDS)
@settings(max_examples=30)
def test_the_sign_of_an_advantage_is_the_side_of_the_groups_mean(
    algorithm: Algorithm, rewards: list[float | None]
) -> None:
    """So the share of advantages that change sign follows from the rewards, without torch. The
    division of some algorithms by the group's mean turns all signs of a group at once, where it is
    negative, so those have rewards of 0 and above here."""
    rewards = [None if reward is None else abs(reward) for reward in rewards]
    size = len(rewards)
    before = BatchBeforeUpdate([0] * size, rewards, torch.arange(size))
    objective = OBJECTIVES[algorithm]
    advantages = objective.estimate(before, objective.defaults).advantage_E.tolist()
    known = [reward for reward in rewards if reward is not None]
    sides = sides_of(rewards) if len(known) > 1 else [0] * size
    assert [(a > 1e-9) - (a < -1e-9) for a in advantages] == [side or 0 for side in sides]
