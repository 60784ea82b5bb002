"""Rewards are weighed again from their recorded parts, with the bits that grading would give."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.regrade.weights import (
    Weighing,
    code_grade,
    reweigh_grade,
    reweigh_rollout,
    weigh_own_reward,
)
from schemas.sampling import Grade
from schemas.specs import RewardSpec, RolloutRef, RubricSpec
from tests.kit.specs import rollout_ref

RUBRIC = RubricSpec(name="tone", text="t", model="openai/judge", weight=0.5)
CLASS = rollout_ref().model_copy(update={"rubrics": (RUBRIC,)})
REWARDS = (RewardSpec(name="right", weight=1.0), RewardSpec(name="short", weight=0.3))
FUNCTIONS = rollout_ref().model_copy(update={"grader": None, "rewards": REWARDS})
NUMBER = st.floats(-10, 10)


def grade(reward: float | None, **parts: float) -> Grade:
    return Grade(index=0, reward=reward, parts=parts)


def new(rollout: RolloutRef, own: float = 1.0, **weights: float) -> Weighing:
    return Weighing(reweigh_rollout(rollout, weights), own)


@given(NUMBER, NUMBER)
def test_the_recorded_weights_give_the_recorded_grade(right: float, short: float) -> None:
    recorded = grade(math.fsum((right, 0.3 * short)), right=right, short=short)
    assert reweigh_grade(recorded, Weighing(FUNCTIONS), Weighing(FUNCTIONS)) is recorded
    assert Weighing(FUNCTIONS).reward(recorded.parts) == recorded.reward


def test_other_weights_of_functions_give_their_weighted_sum() -> None:
    recorded = grade(1.0 + 0.3 * 0.5, right=1.0, short=0.5)
    found = reweigh_grade(recorded, Weighing(FUNCTIONS), new(FUNCTIONS, right=0.0, short=2.0))
    assert (found.reward, found.parts) == (1.0, recorded.parts)


def test_the_own_reward_of_a_grader_is_what_remains_without_the_judges() -> None:
    recorded = grade(1.25, tone=0.5)
    found = reweigh_grade(recorded, Weighing(CLASS), new(CLASS, tone=0.0))
    assert (found.reward, found.parts) == (1.0, {"tone": 0.5, "grader": 1.0})
    halved = reweigh_grade(recorded, Weighing(CLASS), new(CLASS, own=0.5))
    assert halved.reward == 0.75


def test_weights_of_a_regrade_can_be_taken_back() -> None:
    recorded = grade(1.25, tone=0.5)
    without = reweigh_grade(recorded, Weighing(CLASS), new(CLASS, own=0.0))
    assert without.reward == 0.25
    again = reweigh_grade(without, Weighing(CLASS, own=0.0), Weighing(CLASS))
    assert again.reward == recorded.reward


def test_a_part_that_is_not_recorded_is_no_zero() -> None:
    found = reweigh_grade(grade(1.0, right=1.0), Weighing(FUNCTIONS), new(FUNCTIONS, right=2.0))
    assert found.reward is None
    assert found.failure is not None
    assert "no part short" in found.failure.message


def test_a_grade_without_a_reward_stays_without() -> None:
    recorded = grade(None, right=1.0, short=1.0)
    assert reweigh_grade(recorded, Weighing(FUNCTIONS), new(FUNCTIONS, right=9.0)) is recorded


def test_code_alone_has_a_reward_also_where_a_judge_gave_no_score() -> None:
    of_both = FUNCTIONS.model_copy(update={"rubrics": (RUBRIC,)})
    recorded = grade(None, right=1.0, short=1.0)
    assert code_grade(recorded, Weighing(of_both), Weighing(of_both)).reward == 1.3
    alone = code_grade(grade(1.25, tone=0.5), Weighing(CLASS), Weighing(CLASS))
    assert (alone.reward, alone.parts) == (1.0, {"grader": 1.0})


@pytest.mark.parametrize(("rollout", "reward"), [(CLASS, 1.0), (FUNCTIONS, 2.0)])
def test_only_a_graders_own_reward_is_multiplied(rollout: Any, reward: float) -> None:
    [found] = weigh_own_reward([grade(2.0)], Weighing(rollout, own=0.5))
    assert found.reward == reward
