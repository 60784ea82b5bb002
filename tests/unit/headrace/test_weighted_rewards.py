"""Rewards of functions become one number for each sample, or a reason why there is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.grading import Sample
from headrace.user_code.user_code_host import grader_reward, weighted_reward

SAMPLE = Sample(name="sample_0", index=0, text="4", messages=[])


class Disguised(float):
    """A number that becomes another one when it is converted."""

    def __float__(self) -> float:
        return float("nan")


class Changing(float):
    """A number that is another one whenever it is converted again."""

    def __init__(self, _: float) -> None:
        self.times = 0

    def __float__(self) -> float:
        self.times += 1
        return 0.5 if self.times == 1 else float("nan")


class Raising(float):
    """A number that cannot be converted."""

    def __float__(self) -> float:
        raise RuntimeError("no number")


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def reward_of(*values: object, weight: float = 1.0) -> Any:
    def returns(value: object) -> Callable[..., object]:
        return lambda *args, **kwargs: value

    functions = {f"f{number}": returns(value) for number, value in enumerate(values)}
    rewards = [{"name": name, "weight": weight} for name in functions]
    message = {"rewards": rewards, "label": "4", "metadata": {}}
    return await weighted_reward(SAMPLE, message, functions, Path("rollouts/a/main.py"))


async def test_the_sum_has_the_weights() -> None:
    grade = await reward_of(1.0, 0.5, weight=2.0)
    assert (grade["reward"], grade["parts"]) == (3.0, {"f0": 1.0, "f1": 0.5})


@pytest.mark.parametrize(
    ("values", "weight"), [((1.7e308, 1.7e308), 1.0), ((1e308,), 1e10), ((1e308, -1e308), 1e10)]
)
async def test_a_sum_that_is_too_large_fails_its_sample_alone(
    values: tuple[float, ...], weight: float
) -> None:
    grade = await reward_of(*values, weight=weight)
    assert grade["reward"] is None
    assert "return a finite number" in grade["error"]


@pytest.mark.parametrize(
    "value", [pytest.param(10**5000, id="digits"), pytest.param(Unreadable(), id="text")]
)
async def test_a_reward_that_cannot_be_shown_fails_its_sample_alone(value: object) -> None:
    assert "cannot be shown" in (await reward_of(value))["error"]
    assert "cannot be shown" in grader_reward(SAMPLE, value, {})["error"]


@pytest.mark.parametrize("value", [Disguised(0.5), Raising(0.5)])
async def test_a_number_that_does_not_convert_to_a_finite_one_fails_its_sample_alone(
    value: float,
) -> None:
    for grade in (await reward_of(value), grader_reward(SAMPLE, value, {})):
        assert grade["reward"] is None
        assert "a finite number as the reward" in grade["error"]


async def test_the_number_that_was_checked_is_sent() -> None:
    assert (await reward_of(Changing(0.5)))["reward"] == 0.5
    assert grader_reward(SAMPLE, Changing(0.5), {})["reward"] == 0.5
