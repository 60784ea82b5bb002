"""The new grades of recorded groups, as the artifact of a part of a regrade holds them."""

from schemas.sampling import Grade, Value
from schemas.specs import RolloutRef

GRADER_PART = "grader"
"""The name of the reward that a Grader sets itself, among the parts of a reward."""


def has_own_reward(rollout: RolloutRef) -> bool:
    """Whether a Grader sets the reward, and no reward functions do."""
    return not rollout.rewards and (rollout.kind == "server" or rollout.grader is not None)


def part_names(rollout: RolloutRef) -> tuple[str, ...]:
    """Return the names of the parts of a reward."""
    own = (GRADER_PART,) if has_own_reward(rollout) else ()
    models = (one.name for one in rollout.reward_models)
    rubrics = (one.name for one in rollout.rubrics)
    return (*own, *(one.name for one in rollout.rewards), *models, *rubrics)


class RegradedGroup(Value):
    """A group: its id, the step that it was sampled for, the grades before and the new ones, in the
    order of the samples."""

    group: str
    step: int
    before: tuple[Grade, ...]
    after: tuple[Grade, ...]


class RegradedGroups(Value):
    """The content of an artifact: groups in the order of the log."""

    groups: tuple[RegradedGroup, ...]
