"""Issues with the rubrics of a config and the bounds of its judges, as far as the config alone shows
them."""

import math
from collections.abc import Iterator

from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.limits import rubric_bytes, weight_problem
from schemas.specs import MOST_RUBRIC_BYTES, RubricSpec, rubric_specs

BOUNDS = ("judge_max_calls", "judge_max_tokens", "judge_max_usd")
SAYS_PRICE = ("openrouter/",)
"""The beginnings of models whose provider says the price of each answer."""


def rubric_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """Every issue of the keys that concern judges, and of the weights of reward functions."""
    advanced = config.advanced
    yield from _scope_issues(config)
    rubrics = rubric_specs(advanced)
    names = {reward.name for reward in advanced.rewards}
    for index, reward in enumerate(advanced.rewards):
        if problem := weight_problem(reward.weight):
            yield Issue(f"advanced.rewards[{index}].weight", problem)
    for index, rubric in enumerate(rubrics):
        key = f"advanced.rubrics[{index}]"
        if rubric.name in names:
            yield Issue(
                f"{key}.name", f"is {rubric.name}, which another reward has; choose another"
            )
        names.add(rubric.name)
        yield from _value_issues(key, rubric)
        if advanced.judge_max_usd is not None and not _has_price(rubric):
            yield Issue(
                f"{key}.usd_per_million",
                "is missing; advanced.judge_max_usd needs the price of each judge, as "
                "[dollars for prompts, dollars for answers]",
            )
    if (size := rubric_bytes(rubrics)) > MOST_RUBRIC_BYTES:
        yield Issue(
            "advanced.rubrics", f"have {size} bytes; use at most {MOST_RUBRIC_BYTES} in all"
        )
    if not rubrics and not advanced.rewards:
        for name in BOUNDS:
            if getattr(advanced, name) is not None:
                yield Issue(f"advanced.{name}", "has no meaning without rubrics; leave it out")


def _scope_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """Rubrics that compare the answers of a group where that says nothing."""
    for index, rubric in enumerate(config.advanced.rubrics):
        if rubric.scope != "group":
            continue
        key = f"advanced.rubrics[{index}].scope"
        if isinstance(config, EvalConfig):
            yield Issue(
                key,
                "must be 'sample' in an evaluation, got 'group': answers that are compared with each "
                "other have no score that two evaluations share",
            )
        elif config.training.n_samples_per_prompt < 2:
            yield Issue(
                key,
                "must be 'sample' with training.n_samples_per_prompt = 1, got 'group', because there "
                "is nothing to compare; set 2 or more samples",
            )


def _value_issues(key: str, rubric: RubricSpec) -> Iterator[Issue]:
    if not (math.isfinite(rubric.low) and math.isfinite(rubric.high) and rubric.low < rubric.high):
        yield Issue(
            f"{key}.scale",
            f"must be two numbers, the lower one first, got [{rubric.low:g}, {rubric.high:g}]",
        )
    elif problem := weight_problem(
        rubric.weight, largest_part=max(abs(rubric.low), abs(rubric.high))
    ):
        yield Issue(f"{key}.weight", problem)
    if problem := price_problem(rubric.usd_per_million):
        yield Issue(f"{key}.usd_per_million", problem)


def price_problem(usd_per_million: tuple[float, float] | None) -> str | None:
    """Return what is wrong with the price of a model, or None. With prices below 0, what was spent would
    never reach a bound."""
    if all(price >= 0 and math.isfinite(price) for price in usd_per_million or ()):
        return None
    return f"must be two prices in US dollars of at least 0, got {usd_per_million}"


def _has_price(rubric: RubricSpec) -> bool:
    return rubric.usd_per_million is not None or rubric.model.startswith(SAYS_PRICE)
