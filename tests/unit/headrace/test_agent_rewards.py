"""Agents and their rewards, as a workflow names them."""

import math
from typing import Any

import pytest

from headrace import WorkflowContext


def context() -> WorkflowContext:
    return WorkflowContext(prompt=[], metadata={}, base_url="", api_key="")


def test_the_last_word_about_a_turn_and_an_agent_counts() -> None:
    ctx = context()
    for turn, agent in ((2, "critic"), (0, "solver"), (2, "solver")):
        ctx.set_turn_agent(turn, agent)
    ctx.set_agent_reward("solver", 1)
    ctx.set_agent_reward("solver", 0.5)
    turns, rewards = ctx.agent_rewards.end()
    assert list(turns.items()) == [(0, "solver"), (2, "solver")]
    assert rewards == {"solver": 0.5}


@pytest.mark.parametrize(
    ("turn", "agent", "error", "says"),
    [
        (-1, "a", ValueError, "the turn is -1; give a number from 0"),
        (256, "a", ValueError, "the turn is 256"),
        ("0", "a", TypeError, "the turn is str"),
        (0, None, TypeError, "the agent is NoneType; give its name"),
        (0, "", ValueError, "the agent is ''; give a name of up to 63 letters"),
        (0, "the critic", ValueError, "the agent is 'the critic'"),
        (0, "1st", ValueError, "begins with a letter"),
        (0, "a" * 64, ValueError, "give a name"),
    ],
)
def test_an_unusable_turn_or_name_is_refused_where_it_is_set(
    turn: Any, agent: Any, error: type[Exception], says: str
) -> None:
    ctx = context()
    with pytest.raises(error, match=says):
        ctx.set_turn_agent(turn, agent)
    assert ctx.agent_rewards.end() == ({}, {})


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6 + 1, None, "1"])
def test_an_unusable_reward_of_an_agent_is_refused(value: Any) -> None:
    ctx = context()
    with pytest.raises((ValueError, TypeError), match="the reward of agent 'solver' is"):
        ctx.set_agent_reward("solver", value)
    assert ctx.agent_rewards.end() == ({}, {})


def test_there_are_at_most_64_agents() -> None:
    ctx = context()
    for number in range(64):
        ctx.set_turn_agent(number, f"a{number}")
    ctx.set_agent_reward("a3", 1.0)
    with pytest.raises(ValueError, match="agent 'b' is one too many; name at most 64 agents"):
        ctx.set_turn_agent(64, "b")


def test_nothing_can_be_said_after_the_attempt() -> None:
    ctx = context()
    ctx.set_turn_agent(0, "solver")
    ctx.agent_rewards.end()
    with pytest.raises(RuntimeError, match=r"call ctx\.set_turn_agent before `run` returns"):
        ctx.set_turn_agent(1, "solver")
    with pytest.raises(RuntimeError, match=r"call ctx\.set_agent_reward before"):
        ctx.set_agent_reward("solver", 1.0)
    assert ctx.agent_rewards.end() == ({0: "solver"}, {})
