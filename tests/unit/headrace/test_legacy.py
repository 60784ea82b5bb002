"""Reward and rubric functions of older projects are reward functions of a rollout."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import osmosis_reward, osmosis_rubric
from headrace.legacy import ALIAS, EvaluationRefused, evaluate_rubric, provide_alias
from headrace.rewards import is_reward
from headrace.user_code.discovery import load, rewards_of

OLD = """
from osmosis_ai import osmosis_reward, osmosis_rubric, evaluate_rubric

@osmosis_reward
def numbers_match(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float:
    return float(solution_str.strip() == ground_truth)

@osmosis_rubric
def polite(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    return float("please" in solution_str and extra_info == {})
"""


def test_an_old_entry_point_loads_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts" / "old" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(OLD)
    monkeypatch.setitem(sys.modules, ALIAS, None)
    monkeypatch.delitem(sys.modules, ALIAS)
    provide_alias()
    found: dict[str, Any] = dict(rewards_of(load(path)))
    assert sorted(found) == ["numbers_match", "polite"]
    assert found["numbers_match"](" 4", "4", extra_info=None, data_source="x") == 1.0
    assert found["polite"]("please", None, extra_info=None) == 1.0


def test_a_real_package_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ALIAS, None)
    monkeypatch.delitem(sys.modules, ALIAS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    provide_alias()
    assert ALIAS not in sys.modules


async def test_an_async_function_stays_one() -> None:
    @osmosis_reward
    async def late(solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return 0.5

    assert is_reward(late)
    call: Any = late
    assert await call("a", "b", extra_info={}, data_source="dropped") == 0.5


def test_another_first_parameter_is_not_checked() -> None:
    def judge(answer: str, truth: str) -> float:
        return float(answer == truth)

    call: Any = osmosis_reward(judge)
    assert call("a", "a", extra_info={"x": 1}, data_source="y") == 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda solution_str, ground_truth: 1.0,
        lambda solution_str, ground_truth, extra_info: 1.0,
        lambda solution_str, truth, extra_info=None: 1.0,
    ],
)
def test_a_reward_has_one_signature(function: Any) -> None:
    with pytest.raises(TypeError, match="@osmosis_reward <lambda> must have the signature"):
        osmosis_reward(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda solution_str, ground_truth, extra_info=None, **kwargs: 1.0,
        lambda answer, ground_truth, extra_info, **kwargs: 1.0,
        lambda solution_str, ground_truth: 1.0,
    ],
)
def test_a_rubric_has_one_signature(function: Any) -> None:
    with pytest.raises(TypeError, match="@osmosis_rubric <lambda> must have the signature"):
        osmosis_rubric(function)


def test_a_judge_cannot_be_asked_from_inside() -> None:
    with pytest.raises(EvaluationRefused, match="write the rubric as `@rubric"):
        evaluate_rubric(rubric="polite?", solution_str="x", model="openai/gpt-5-mini")
