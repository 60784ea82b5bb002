"""The decorators of older projects of the package `osmosis-ai`, up to its version 0.2.17.

`from headrace import osmosis_reward, osmosis_rubric` works, and so does `from osmosis_ai import ...`
if that package is not installed (`provide_alias`). A function that either of them marks is a reward
function of the rollout, so a config names it in `advanced.rewards`.
"""

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from headrace.rewards import MARK

ALIAS = "osmosis_ai"

REWARD_SIGNATURE = (
    "(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float"
)
RUBRIC_SIGNATURE = (
    "(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float"
)
LEGACY_NAMES = ["solution_str", "ground_truth", "extra_info"]

RewardFunction = Callable[..., object]


def osmosis_reward(function: RewardFunction) -> RewardFunction:
    """Mark a reward function of an older project, sync or async. Raises TypeError if its first
    parameter is `solution_str` and its signature is not REWARD_SIGNATURE. Functions with another first
    parameter are not checked, and get the answer and the ground truth by position."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == LEGACY_NAMES[0]:
        names = [parameter.name for parameter in parameters[:3]]
        if names != LEGACY_NAMES or parameters[2].default is inspect.Parameter.empty:
            raise TypeError(
                f"@osmosis_reward {function.__name__} must have the signature {REWARD_SIGNATURE}"
            )
    return _reward_function(function, parameters, lambda extra_info: extra_info)


def osmosis_rubric(function: RewardFunction) -> RewardFunction:
    """Mark a rubric function of an older project, sync or async. Raises TypeError unless its signature
    is RUBRIC_SIGNATURE. `extra_info` is always a dict for it."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters[:3]]
    if names != LEGACY_NAMES or parameters[2].default is not inspect.Parameter.empty:
        raise TypeError(
            f"@osmosis_rubric {function.__name__} must have the signature {RUBRIC_SIGNATURE}"
        )
    return _reward_function(function, parameters, lambda extra_info: extra_info or {})


def _reward_function(
    function: RewardFunction,
    parameters: list[inspect.Parameter],
    prepare: Callable[[dict[str, object] | None], dict[str, object] | None],
) -> RewardFunction:
    """Return `function` with the signature of `@reward`. It gets only the arguments that it takes."""
    kinds = [parameter.kind for parameter in parameters]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    known = {parameter.name for parameter in parameters[2:]}

    @functools.wraps(function)
    def call(
        solution_str: str,
        ground_truth: str,
        extra_info: dict[str, object] | None = None,
        **kwargs: object,
    ) -> object:
        given = {"extra_info": prepare(extra_info), **kwargs}
        taken = {name: value for name, value in given.items() if takes_any or name in known}
        return function(solution_str, ground_truth, **taken)

    setattr(call, MARK, True)
    return call


class EvaluationRefused(RuntimeError):
    """`evaluate_rubric` was called where no judge can be asked."""


def evaluate_rubric(*args: object, **kwargs: object) -> Any:
    """Refuse to ask a judge. User code has no network and no keys of judges, so a rubric is given to
    Headrace, which asks outside of the sandbox. Raises EvaluationRefused."""
    raise EvaluationRefused(
        "evaluate_rubric cannot ask a judge from inside the sandbox; write the rubric as "
        '`@rubric("...", model="...")` from headrace, or as [[advanced.rubrics]] in the config'
    )


def provide_alias() -> None:
    """Let `import osmosis_ai` find the decorators, unless the real package is installed."""
    if ALIAS in sys.modules or importlib.util.find_spec(ALIAS) is not None:
        return
    module = types.ModuleType(ALIAS, "The decorators of older projects, from headrace.")
    for value in (osmosis_reward, osmosis_rubric, evaluate_rubric):
        setattr(module, value.__name__, value)
    sys.modules[ALIAS] = module
