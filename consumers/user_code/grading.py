"""Grades samples: what a grader, reward models and judges say becomes a grade as it enters the log.

The consumer that grades new groups (`consumers/grade.py`) and the one that grades recorded groups again
(`consumers/regrade/`) call these functions, so that equal code and samples give equal grades.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from consumers.judging.panel import JudgePorts
from consumers.user_code.interrupted_calls import until_uninterrupted
from consumers.user_code.user_secrets import sandbox_owner
from infra.ports.services import UserCode, UserCodeRaised, UserOutput
from infra.spine.ports.artifacts import Artifacts
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, FailureCategory, UserCodeError
from schemas.limits import LARGEST_REWARD
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import (
    Grade,
    Judgement,
    RewardScore,
    SampleBatch,
    SampleFailure,
    SampleRecord,
)
from schemas.specs import GroupSpec, SampleEntry

Judged = tuple[tuple[Grade, ...], tuple[Judgement, ...]]
"""Grades with the scores of judges, and the judgements."""

Judge = Callable[
    [Sequence[tuple[SampleRecord, Grade]], Mapping[int, Mapping[str, str]]], Awaitable[Judged]
]
"""Adds the scores of judges to the grades of samples. The texts are those of the entry point's rubrics,
by sample and rubric."""


@dataclass(frozen=True, slots=True)
class GraderPorts(JudgePorts):
    """The sandbox with the user's grader, the judges, and the samples."""

    artifacts: Artifacts
    user: UserCode


def add_model_scores(
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
        if not is_usable(reward):
            message = (
                f"the score {found.score:g} of the reward model {model.name}, times its weight "
                f"{model.weight:g}, makes the reward {reward:g}; set a smaller weight in "
                "advanced.reward_models"
            )
            failure = SampleFailure(category=FailureCategory.GRADER, message=message)
            return grade.model_copy(update={"reward": None, "failure": failure})
    return grade.model_copy(update={"reward": reward, "parts": parts})


def parse_batch(data: bytes, ref: ArtifactRef) -> SampleBatch:
    """Return the samples of an artifact. Raises CorruptData when it does not hold samples."""
    try:
        return SampleBatch.model_validate_json(data)
    except ValidationError as error:
        raise CorruptData(f"{ref.uri} does not hold samples: {error}") from error


def missing_record(entry: SampleEntry) -> SampleRecord:
    """Return a record for a sample that failed and is therefore in no part. Its entry has the reason."""
    failure = SampleFailure(
        category=FailureCategory(entry.failure or FailureCategory.INTERNAL),
        message=entry.message or "the sample was lost",
    )
    return SampleRecord(index=entry.index, failure=failure)


async def call_grader(
    spec: GroupSpec,
    samples: Sequence[SampleRecord],
    ports: GraderPorts,
    *,
    on_behalf_of: str | None = None,
) -> tuple[tuple[Grade, ...], UserOutput | None]:
    """Return the grades of the user's grader, and what it left behind. If the grader fails, every grade
    carries that failure. A grader that takes too long is a failure of the grader; `timeout` is that of
    a sample. With `on_behalf_of` (an id) the grader runs in a sandbox of that owner, and not in the one
    of the run that made the group."""
    rollout = spec.template.rollout
    if rollout is None or not samples:
        return (), None
    if rollout.is_scored_by_models:
        return tuple(Grade(index=sample.index, reward=0.0) for sample in samples), None
    if rollout.kind == "server":
        return tuple(sample.grade for sample in samples if sample.grade is not None), None
    row = (await ports.datasets.rows(spec.template.dataset))[spec.row]
    try:
        owner = await sandbox_owner(spec, rollout, ports.secrets, owner=on_behalf_of)
        call = spec.group if on_behalf_of is None else f"{on_behalf_of}/{spec.group}"
        result = await until_uninterrupted(
            lambda: ports.user.grade(
                rollout,
                owner=owner,
                group=call,
                label=row.label,
                metadata=row.metadata,
                samples=samples,
            )
        )
    except UserCodeError as error:
        is_late = error.category == FailureCategory.TIMEOUT
        category = FailureCategory.GRADER if is_late else error.category
        failure = SampleFailure(category=category, message=error.message)
        left = error.output if isinstance(error, UserCodeRaised) else None
        return tuple(Grade(index=s.index, reward=None, failure=failure) for s in samples), left
    return result.grades, result.output


async def complete_grades(
    spec: GroupSpec, records: Sequence[SampleRecord], graded: Sequence[Grade], judge: Judge
) -> Judged:
    """Return the grade of each sample as it enters the log, and the judgements: the grader's grades with
    the scores of reward models and of judges. A sample that failed in a way for which the run has a
    number gets that."""
    rollout, number = spec.template.rollout, len(records)
    failed_rewards = rollout.failed_rewards if rollout else {}
    scoring = rollout.reward_models if rollout else ()
    by_index = {grade.index: grade for grade in graded}
    checked = [
        (r, add_model_scores(validate_grade(r, by_index.get(r.index), number), r, scoring))
        for r in records
    ]
    questions = {grade.index: grade.questions for grade in graded}
    grades, judgements = await judge(checked, questions)
    fixed = (
        fixed_grade(r, failed_rewards) or validate_grade(r, g, number)
        for r, g in zip(records, grades, strict=True)
    )
    return tuple(fixed), judgements


def is_scored(record: SampleRecord, failed: Mapping[str, float | str]) -> bool:
    """Whether the grader scores a sample: it did not fail, or the run asks for it."""
    return record.failure is None or failed.get(record.failure.category) == "grade"


def fixed_grade(record: SampleRecord, failed: Mapping[str, float | str]) -> Grade | None:
    """The grade of a sample that failed in a way for which the run has a number, else None. No judge is
    asked about it."""
    reward = failed.get(record.failure.category) if record.failure else None
    if not isinstance(reward, int | float):
        return None
    return Grade(index=record.index, reward=float(reward))


def validate_grade(record: SampleRecord, grade: Grade | None, num_samples: int) -> Grade:
    """Return the sample's grade as it enters the log: a finite reward, or None and the reason."""
    if grade is None:
        failure = record.failure or SampleFailure(
            category=FailureCategory.VALIDATION, message="the grader returned no reward"
        )
        grade = Grade(index=record.index, reward=None, failure=failure)
    reward, failed = grade.reward, grade.failure
    named = {"reward": reward} if reward is not None else {}
    named |= {f"reward {name!r}": part for name, part in grade.parts.items()}
    unusable = [f"the {name} is {value!r}" for name, value in named.items() if not is_usable(value)]
    if unusable and failed is None:
        failed = SampleFailure(
            category=FailureCategory.GRADER,
            message=f"{unusable[-1]}; return a finite number from {-LARGEST_REWARD:,.0f} to "
            f"{LARGEST_REWARD:,.0f}",
        )
    if failed is not None:
        message = excerpt(failed.message, num_samples=num_samples)
        failed = SampleFailure(category=failed.category, message=message)
    return Grade(
        index=record.index,
        reward=float(reward) if reward is not None and failed is None else None,
        parts={name: float(part) for name, part in grade.parts.items() if is_usable(part)},
        failure=failed,
    )


def is_usable(value: object) -> bool:
    """Whether a value may be a reward: a finite number that is not too large."""
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= LARGEST_REWARD
