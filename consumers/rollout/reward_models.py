"""Asks the reward models of a run about a sample, on the worker that made it.

A score becomes part of the sample's record, so that it is a fact: a grader, a replay and a verification
read it, and none of them needs the model. A sample that a model cannot score has the reason instead, and
gets no reward (`consumers/user_code/grading.py`). It is never given a wrong one.
"""

from infra.spine.runtime.error_excerpt import excerpt
from schemas.errors import UserCodeError
from schemas.models.reward_model import RewardModelSpec, Scorer
from schemas.sampling import RewardScore, SampleRecord
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
