"""Rewards for mathematical expressions, by the package `math-verify`."""

import importlib
from typing import Any

from headrace.graders.answers import truth_of
from headrace.rewards import reward

try:
    package: Any = importlib.import_module("math_verify")
except ImportError as error:
    raise ImportError(
        "the grader math_verify needs the package math-verify; add "
        '"math-verify[antlr4_13_2]" to the dependencies in the pyproject.toml of this rollout'
    ) from error

LONGEST = 20_000
"""Only this many characters at the end of an answer are parsed."""

SECONDS = 5
"""The most seconds in which an expression is parsed or compared. After that it counts as wrong."""


@reward
def math_verify(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return 1.0 if the final expression of the answer equals that of the ground truth, for example
    `\\boxed{\\frac{2}{4}}` and `1/2`."""
    truth = package.parse(_as_latex(truth_of(ground_truth)), parsing_timeout=SECONDS)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} is not a mathematical expression")
    found = package.parse(solution_str[-LONGEST:], parsing_timeout=SECONDS)
    return float(bool(found) and bool(package.verify(truth, found, timeout_seconds=SECONDS)))


def _as_latex(truth: str) -> str:
    """A ground truth without marks of LaTeX is an expression as a whole."""
    return truth if "$" in truth or "\\boxed" in truth else f"${truth}$"
