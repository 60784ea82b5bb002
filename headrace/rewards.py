"""Reward functions: the simple form of a grader, for rewards that are a function of one answer."""

import inspect
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

MARK = "__headrace_reward__"
SIGNATURE = (
    "(solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float"
)


def reward(function: F) -> F:
    """Mark a reward function, sync or async, and return it. Raises TypeError unless its signature is
    SIGNATURE."""
    check_signature(function, "@reward")
    setattr(function, MARK, True)
    return function


def check_signature(function: Callable[..., object], decorator: str) -> None:
    """Raise TypeError unless a function has the signature SIGNATURE."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    good = (
        names[:3] == ["solution_str", "ground_truth", "extra_info"]
        and len(parameters) == 4
        and parameters[2].default is None
        and parameters[3].kind is inspect.Parameter.VAR_KEYWORD
    )
    if not good:
        raise TypeError(f"{decorator} {function.__name__} must have the signature {SIGNATURE}")


def is_reward(value: object) -> bool:
    """Whether `value` is a function marked by @reward."""
    return callable(value) and getattr(value, MARK, False) is True
