"""The scores of reward models in the record and in the reward of a sample."""

from collections.abc import Sequence
from typing import Any

import pytest

from consumers.rollout.reward_models import ask_reward_models
from consumers.user_code.grading import add_model_scores
from schemas.artifact_refs import ArtifactRef
from schemas.errors import FailureCategory, Refused, UserCodeError
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import (
    Grade,
    Message,
    ModelRef,
    RewardScore,
    SampleFailure,
    SampleRecord,
    ToolSpec,
)
from schemas.specs import RolloutRef
from tests.kit.specs import template

WEIGHTS = ArtifactRef(uri="row:1", sha256="0" * 64, size=1)
BASE = ModelRef(kind="scratch", name="qwen3-tiny")


def spec(name: str, weight: float = 1.0) -> RewardModelSpec:
    return RewardModelSpec(
        name=name, weight=weight, checkpoint="r@1", base=BASE, weights=WEIGHTS, lora_alpha=1.0
    )


def rollout(*models: RewardModelSpec, **changes: Any) -> RolloutRef:
    made = template().rollout
    assert made is not None
    return made.model_copy(update={"reward_models": models, **changes})


class Lengths:
    """A scorer that likes long answers, and cannot read those with a question mark."""

    async def score(
        self, model: RewardModelSpec, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> float:
        text = messages[-1].content
        if "?" in text:
            raise UserCodeError(FailureCategory.GRADER, "cannot read it")
        return float(len(text))


def record(text: str, failure: FailureCategory | None = None) -> SampleRecord:
    failed = SampleFailure(category=failure, message="m") if failure else None
    said = (Message(role="assistant", content=text),)
    return SampleRecord(index=0, messages=said, text=text, failure=failed)


async def test_a_record_holds_the_score_of_each_model() -> None:
    found = await ask_reward_models(record("abc"), rollout(spec("a"), spec("b")), Lengths())
    assert found.scores == (RewardScore(name="a", score=3.0), RewardScore(name="b", score=3.0))


async def test_a_run_without_reward_models_has_the_records_that_it_had() -> None:
    before = record("abc")
    assert await ask_reward_models(before, rollout(), Lengths()) is before
    assert "scores" not in before.model_dump()
    assert "reward_models" not in rollout().model_dump()


async def test_a_failed_sample_is_scored_only_where_the_run_grades_such_samples() -> None:
    late = record("abc", FailureCategory.TIMEOUT)
    assert (await ask_reward_models(late, rollout(spec("a")), Lengths())).scores == ()
    graded = rollout(spec("a"), failed_rewards={"timeout": "grade"})
    assert (await ask_reward_models(late, graded, Lengths())).scores[0].score == 3.0


async def test_an_answer_that_a_model_cannot_read_has_the_reason() -> None:
    found = await ask_reward_models(record("what?"), rollout(spec("a")), Lengths())
    assert found.scores == (RewardScore(name="a", problem="cannot read it"),)
    grade = add_model_scores(Grade(index=0, reward=1.0), found, [spec("a")])
    assert grade.reward is None
    assert grade.failure is not None
    assert grade.failure.message == "the reward model a gave no score: cannot read it"


async def test_a_model_that_cannot_be_loaded_is_not_a_fault_of_the_sample() -> None:
    class Missing:
        async def score(self, *_: object) -> float:
            raise Refused("no such model")

    with pytest.raises(Refused):
        await ask_reward_models(record("abc"), rollout(spec("a")), Missing())


def test_the_weighted_scores_are_added_to_the_reward() -> None:
    scored = record("abc").model_copy(
        update={"scores": (RewardScore(name="a", score=3.0), RewardScore(name="b", score=-1.0))}
    )
    graded = add_model_scores(
        Grade(index=0, reward=1.0, parts={"own": 1.0}), scored, [spec("a", 0.5), spec("b", 2.0)]
    )
    assert graded.reward == 1.0 + 0.5 * 3.0 - 2.0
    assert graded.parts == {"own": 1.0, "a": 3.0, "b": -1.0}


@pytest.mark.parametrize("weight", [1e6, 1e308])
def test_a_score_that_makes_the_reward_too_large_names_its_weight(weight: float) -> None:
    scored = record("abc").model_copy(update={"scores": (RewardScore(name="a", score=3.0),)})
    grade = add_model_scores(Grade(index=0, reward=1.0), scored, [spec("a", weight)])
    assert grade.reward is None
    assert grade.failure is not None
    assert grade.failure.category == FailureCategory.GRADER
    assert (
        f"the score 3 of the reward model a, times its weight {weight:g}" in grade.failure.message
    )
    assert "set a smaller weight in advanced.reward_models" in grade.failure.message


def test_a_sample_without_a_reward_stays_without_one() -> None:
    scored = record("abc").model_copy(update={"scores": (RewardScore(name="a", score=3.0),)})
    grade = Grade(index=0, reward=None)
    assert add_model_scores(grade, scored, [spec("a")]) is grade


def test_reward_models_alone_need_no_grader() -> None:
    bare = {"grader": None, "rewards": ()}
    assert rollout(spec("a"), **bare).is_scored_by_models
    assert not rollout(**bare).is_scored_by_models
    assert not rollout(spec("a"), grader="Check", rewards=()).is_scored_by_models
