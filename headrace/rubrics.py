"""Rubrics: criteria in words, by which a model outside of the sandbox scores each answer."""

import math
from collections.abc import Callable
from typing import TypeVar

from headrace.rewards import check_signature

F = TypeVar("F", bound=Callable[..., object])

MARK = "__headrace_rubric__"
LONGEST_CRITERIA = 4000


def rubric(
    criteria: str,
    *,
    model: str,
    scale: tuple[float, float] = (0, 1),
    base_url: str | None = None,
    api_key_secret: str | None = None,
    usd_per_million: tuple[float, float] | None = None,
) -> Callable[[F], F]:
    """Mark a function as a rubric, which `advanced.rewards` may name like a reward function.

    A judge scores each answer from `scale[0]` to `scale[1]` by the criteria. `model` is PROVIDER/MODEL,
    or with `base_url` a model of an OpenAI-compatible server. The key is the workspace's secret of the
    provider, or `api_key_secret`, and never enters the sandbox. `usd_per_million` is the price of
    prompt tokens and answer tokens.

    The function has the signature of a reward function. It returns the text that the judge reads, or
    None for the prompt, the answer and the ground truth.

        @rubric("The answer is polite.", model="openai/gpt-5-mini", scale=(1, 5))
        def polite(solution_str, ground_truth, extra_info=None, **kwargs):
            return None

    Raises TypeError and ValueError for arguments that cannot be used.
    """
    if not isinstance(criteria, str) or not 0 < len(criteria) <= LONGEST_CRITERIA:
        raise ValueError(
            f"the criteria of a rubric must be text of at most {LONGEST_CRITERIA} characters"
        )
    if not isinstance(model, str) or not model:
        raise ValueError("a rubric needs a model, such as 'openai/gpt-5-mini'")
    low, high = (float(bound) for bound in scale)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"the scale of a rubric must be two numbers, the lower first, got {scale}")
    prices = None if usd_per_million is None else [float(price) for price in usd_per_million]
    if prices is not None and (len(prices) != 2 or not all(0 <= p < math.inf for p in prices)):
        raise ValueError(
            f"the usd_per_million of a rubric must be two prices of at least 0, got {usd_per_million}"
        )
    described = {
        "text": criteria,
        "model": model,
        "low": low,
        "high": high,
        "base_url": base_url,
        "api_key_secret": api_key_secret,
        "usd_per_million": prices,
    }

    def mark(function: F) -> F:
        check_signature(function, "@rubric")
        setattr(function, MARK, described)
        return function

    return mark


def description_of(value: object) -> dict[str, object] | None:
    """Return what @rubric was given for `value`, or None if it is not a rubric."""
    found = getattr(value, MARK, None) if callable(value) else None
    return found if isinstance(found, dict) else None
