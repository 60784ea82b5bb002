"""Issues with the reward models of a config, as far as the config alone shows them."""

from collections.abc import Iterator

from schemas.config import RunConfig
from schemas.errors import Issue
from schemas.limits import weight_problem
from schemas.models.reward_model import score_names
from schemas.specs import rubric_specs


def reward_model_issues(config: RunConfig) -> Iterator[Issue]:
    """Names that another part of the reward has, and weights that are too large."""
    advanced = config.advanced
    names = {reward.name for reward in advanced.rewards}
    names |= {rubric.name for rubric in rubric_specs(advanced)}
    for index, name in enumerate(score_names(advanced.reward_models)):
        key, weight = f"advanced.reward_models[{index}]", advanced.reward_models[index].weight
        if name in names:
            yield Issue(f"{key}.name", f"is {name}, which another reward has; choose another")
        names.add(name)
        if problem := weight_problem(weight):
            yield Issue(f"{key}.weight", problem)
