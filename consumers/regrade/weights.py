"""The weights of the parts of a reward, and rewards that are computed again from recorded parts.

Pure functions. They add parts in the order of `consumers/user_code/grading.py`, so a reward that is
weighed again has the bits that grading with these weights gives. With the weights of the recorded grades
they return these grades.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import FailureCategory
from schemas.events.regrades.groups import GRADER_PART as GRADER
from schemas.events.regrades.groups import has_own_reward
from schemas.sampling import Grade, SampleFailure
from schemas.specs import RolloutRef


@dataclass(frozen=True, slots=True)
class Weighing:
    """How parts make a reward: the weights of a rollout, and that of its Grader's own reward."""

    rollout: RolloutRef
    own: float = 1.0

    @property
    def has_own_reward(self) -> bool:
        """Whether a Grader sets the reward, and no reward functions do."""
        return has_own_reward(self.rollout)

    @property
    def added_weights(self) -> dict[str, float]:
        """The weights of the scores that are added to what the code returned, in their order."""
        rollout = self.rollout
        models = {one.name: one.weight for one in rollout.reward_models}
        return models | {one.name: one.weight for one in rollout.rubrics}

    @property
    def weights(self) -> dict[str, float]:
        """The weights of all parts, by name."""
        own = {GRADER: self.own} if self.has_own_reward else {}
        return own | {one.name: one.weight for one in self.rollout.rewards} | self.added_weights

    def code_reward(self, parts: Mapping[str, float]) -> float:
        """Return what the code alone gives: its weighted functions, or its Grader's own reward."""
        if self.has_own_reward:
            return self.own * parts[GRADER]
        return math.fsum(one.weight * parts[one.name] for one in self.rollout.rewards)

    def reward(self, parts: Mapping[str, float]) -> float:
        """Return the reward that these parts make."""
        reward = self.code_reward(parts)
        for name, weight in self.added_weights.items():
            reward += weight * parts[name]
        return reward

    def parts_of(self, grade: Grade) -> dict[str, float]:
        """Return the parts of a grade that was weighed like this. The own reward of a Grader is what
        remains without the others, unless an earlier regrade recorded it."""
        parts, added = dict(grade.parts), self.added_weights
        is_open = self.has_own_reward and GRADER not in parts and self.own != 0
        if is_open and grade.reward is not None and all(name in parts for name in added):
            rest = grade.reward
            for name, weight in reversed(added.items()):
                rest -= weight * parts[name]
            parts[GRADER] = rest / self.own
        return parts


def reweigh_rollout(rollout: RolloutRef, weights: Mapping[str, float]) -> RolloutRef:
    """Return the rollout with other weights of its reward functions, reward models and rubrics."""
    changed = {
        name: tuple(
            one.model_copy(update={"weight": weights.get(one.name, one.weight)}) for one in parts
        )
        for name, parts in (
            ("rewards", rollout.rewards),
            ("reward_models", rollout.reward_models),
            ("rubrics", rollout.rubrics),
        )
    }
    return rollout.model_copy(update=changed)


def reweigh_grade(grade: Grade, old: Weighing, new: Weighing) -> Grade:
    """Return a grade with other weights of its parts. A grade without a reward stays as it is."""
    if grade.reward is None or old.weights == new.weights:
        return grade
    parts = old.parts_of(grade)
    if missing := [name for name in new.weights if name not in parts]:
        return _without(grade, missing)
    return grade.model_copy(update={"reward": new.reward(parts), "parts": parts})


def code_grade(grade: Grade, old: Weighing, new: Weighing) -> Grade:
    """Return a recorded grade as the code alone gave it, without reward models and judges. It has a
    reward if the log holds what the code returned, also where a judge gave no score."""
    parts = old.parts_of(grade)
    names = [GRADER] if new.has_own_reward else [one.name for one in new.rollout.rewards]
    if missing := [name for name in names if name not in parts]:
        return grade if grade.failure is not None else _without(grade, missing)
    own = {name: parts[name] for name in names}
    return Grade(index=grade.index, reward=new.code_reward(own), parts=own)


def _without(grade: Grade, missing: Sequence[str]) -> Grade:
    message = f"its recorded grade has no part {', '.join(missing)}; name a grader with --grader"
    failure = SampleFailure(category=FailureCategory.VALIDATION, message=message)
    return Grade(index=grade.index, reward=None, parts=grade.parts, failure=failure)


def weigh_own_reward(grades: Sequence[Grade], weighing: Weighing) -> tuple[Grade, ...]:
    """Return what a Grader returned, with its own reward as a part and multiplied by its weight."""
    if not weighing.has_own_reward:
        return tuple(grades)
    return tuple(
        grade.model_copy(
            update={
                "reward": weighing.own * grade.reward,
                "parts": {**grade.parts, GRADER: grade.reward},
            }
        )
        if grade.reward is not None and grade.failure is None
        else grade
        for grade in grades
    )
