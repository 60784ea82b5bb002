"""Rewards of turns, as a workflow sets them."""

import math
from typing import Any

import pytest

from headrace import WorkflowContext


def context() -> WorkflowContext:
    return WorkflowContext(prompt=[], metadata={}, base_url="", api_key="")


def test_a_later_reward_replaces_the_earlier_one_of_its_turn() -> None:
    ctx = context()
    for turn, value in ((2, 1), (0, 0.5), (2, -1.0)):
        ctx.set_turn_reward(turn, value)
    assert list(ctx.turn_rewards.end().items()) == [(0, 0.5), (2, -1.0)]


@pytest.mark.parametrize(
    ("turn", "value", "error", "says"),
    [
        (0, math.nan, ValueError, "the reward of turn 0 is nan; give a finite number"),
        (0, -math.inf, ValueError, "give a finite number from -1,000,000 to 1,000,000"),
        (3, 1e6 + 1, ValueError, "the reward of turn 3 is 1000001.0"),
        (0, None, TypeError, "the reward of turn 0 is NoneType; give a number"),
        (0, "1", TypeError, "is str; give a number"),
        (-1, 1.0, ValueError, "the turn is -1; give a number from 0, the first answer, to 255"),
        (256, 1.0, ValueError, "the turn is 256"),
        (True, 1.0, TypeError, "the turn is bool; give its number"),
        (0.0, 1.0, TypeError, "the turn is float"),
    ],
)
def test_an_unusable_reward_is_refused_where_it_is_set(
    turn: Any, value: Any, error: type[Exception], says: str
) -> None:
    ctx = context()
    with pytest.raises(error, match=says.replace(".", r"\.").replace("(", r"\(")):
        ctx.set_turn_reward(turn, value)
    assert ctx.turn_rewards.end() == {}


def test_a_reward_after_the_attempt_is_refused() -> None:
    ctx = context()
    ctx.set_turn_reward(0, 1.0)
    assert ctx.turn_rewards.end() == {0: 1.0}
    with pytest.raises(RuntimeError, match="the attempt has ended"):
        ctx.set_turn_reward(1, 1.0)
    assert ctx.turn_rewards.end() == {0: 1.0}
