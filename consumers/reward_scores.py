"""Asks the reward models of a run about a sample, on the worker that made it.

A score becomes part of the sample's record, so that it is a fact: a grader, a replay and a verification
read it, and none of them needs the model. A sample that a model cannot score has the reason instead, and
gets no reward (`with_scores`). It is never given a wrong one.
"""

from collections.abc import Sequence

from infra.spine.runtime.error_excerpt import excerpt
from schemas.errors import FailureCategory, UserCodeError
from schemas.reward_models import RewardModelSpec, Scorer
from schemas.sampling import Grade, RewardScore, SampleFailure, SampleRecord
from schemas.specs import RolloutRef


async def ask_reward_models(
    record: SampleRecord, rollout: RolloutRef, scorer: Scorer
) -> SampleRecord:
    """Return the record with the scores of the run's reward models. A sample that failed has none,
    unless the run has such samples graded. Raises Refused when a model cannot be loaded."""
    failure = record.failure
    if failure is not None and rollout.failed_rewards.get(failure.category) != "grade":
        return record
    scores = [await _score(record, model, scorer) for model in rollout.reward_models]
    return record.model_copy(update={"scores": tuple(scores)}) if scores else record


async def _score(record: SampleRecord, model: RewardModelSpec, scorer: Scorer) -> RewardScore:
    try:
        score = await scorer.score(model, record.messages, record.tools)
    except UserCodeError as error:
        return RewardScore(name=model.name, problem=excerpt(error.message))
    return RewardScore(name=model.name, score=score)


def with_scores(
    grade: Grade, record: SampleRecord, reward_models: Sequence[RewardModelSpec]
) -> Grade:
    """Return a grade with the weighted scores of the run's reward models in its reward. Without one of
    them it has no reward."""
    if grade.reward is None or not reward_models:
        return grade
    by_name = {score.name: score for score in record.scores}
    reward, parts = grade.reward, dict(grade.parts)
    for model in reward_models:
        found = by_name.get(model.name, RewardScore(name=model.name, problem="it was not asked"))
        if found.score is None:
            message = f"the reward model {model.name} gave no score: {found.problem}"
            failure = SampleFailure(category=FailureCategory.GRADER, message=message)
            return grade.model_copy(update={"reward": None, "failure": failure})
        parts[model.name] = found.score
        reward += model.weight * found.score
    return grade.model_copy(update={"reward": reward, "parts": parts})
