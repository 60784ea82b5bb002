"""Grades generated groups.
Reads: GroupGenerated.  Emits: GroupGraded.  Stream: grade.
Does: runs the user's Grader or reward functions, asks judges and teachers on servers (lane: user).
Waits for: nothing.
Safe to repeat because: one grade stream per group; a second outcome decides nothing.

Every sample gets a grade. If the sample or its grader failed, or the grader returned something that is
not a finite number, the reward is None and the grade holds the reason. Such a sample is left out of
every baseline. Its reward is never turned into 0, which would be a statement about the sample, unless
the run says what a sample that the policy made fail is worth (`advanced.failed_reward`). A rollout
server has graded its samples when it made them, and those grades are used.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from pydantic import ValidationError

from consumers.interrupted_calls import until_uninterrupted
from consumers.judging.panel import JudgePorts, judge_group
from consumers.judging.teacher_logprobs import ask_teacher
from consumers.stored_files import store_output
from consumers.user_secrets import sandbox_owner
from infra.ports.services import UserCode, UserCodeRaised, UserOutput
from infra.ports.teachers import Teachers
from infra.spine.ports.artifacts import Artifacts
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.effects import Failed, GradeGroup, GroupScored
from schemas.errors import CorruptData, FailureCategory, UserCodeError
from schemas.events import GroupGenerated, GroupGraded
from schemas.ids import ConsumerName, StreamName, grade_stream
from schemas.limits import LARGEST_REWARD
from schemas.models.reward_model import RewardModelSpec
from schemas.models.teacher import fill_hint
from schemas.sampling import (
    Grade,
    Judgement,
    JudgementBatch,
    JudgeUsage,
    RewardScore,
    SampleBatch,
    SampleFailure,
    SampleRecord,
)
from schemas.specs import GroupSpec, SampleEntry

NO_SAMPLES = ArtifactRef(uri="none:", sha256=hashlib.sha256(b"").hexdigest(), size=0)
"""The artifact of a group that has no samples and whose grading failed. All its rewards are None, so no
batch will ever read it."""

GradeMessage = GroupGenerated | GroupScored | Failed


@dataclass(frozen=True, slots=True)
class GradeState:
    """Whether the group is graded."""

    graded: bool = False


def evolve(state: GradeState, event: GroupGraded) -> GradeState:
    """Return the state after one event of a grade stream."""
    match event:
        case GroupGraded():
            return GradeState(graded=True)
        case _:
            assert_never(event)


def handle(state: GradeState, message: GradeMessage, meta: Meta) -> Decision:
    """Grade a generated group once, even if its grader fails."""
    if state.graded:
        return NOTHING
    match message:
        case GroupGenerated(spec=spec, parts=parts, entries=entries):
            effect = GradeGroup(spec=spec, parts=parts, entries=entries, generate_s=message.seconds)
            return Decision(effects=(effect,))
        case GroupScored(effect=effect):
            graded = _decide_grades(effect, message.group_artifact, message.grades, meta)
            judged = {"judgements": message.judgements, "judged": message.judged}
            return Decision(events=(graded.model_copy(update=judged),))
        case Failed(effect=GradeGroup() as effect):
            failure = SampleFailure(
                category=message.category,
                message=excerpt(message.message, num_samples=len(effect.entries)),
            )
            grades = (Grade(index=e.index, reward=None, failure=failure) for e in effect.entries)
            artifact = effect.parts[0] if effect.parts else NO_SAMPLES
            return Decision(events=(_decide_grades(effect, artifact, tuple(grades), meta),))
        case _:
            return NOTHING


def _decide_grades(
    effect: GradeGroup, artifact: ArtifactRef, grades: tuple[Grade, ...], meta: Meta
) -> GroupGraded:
    return GroupGraded(
        spec=effect.spec,
        artifact=artifact,
        entries=effect.entries,
        grades=grades,
        generate_s=effect.generate_s,
        grade_s=meta.seconds,
    )


def routes(message: GradeMessage) -> tuple[StreamName, ...]:
    """Return the grade stream of the message's group."""
    return (grade_stream(message.spec.group),) if isinstance(message, GroupGenerated) else ()


@dataclass(frozen=True, slots=True)
class GradePorts(JudgePorts):
    """The sandbox with the user's grader, the judges, the teachers on servers, and the samples."""

    artifacts: Artifacts
    user: UserCode
    teachers: Teachers


async def perform(effect: GradeGroup, ports: GradePorts) -> GroupScored:
    """Read the samples, grade those that did not fail, and store all of them in one artifact, with what
    a teacher on a server says about them. Returns the artifact and the grades. Raises TransientError
    when the sandbox or the teacher is gone, CorruptData when a part cannot be read."""
    batches = [
        _parse_batch(await ports.artifacts.get_artifact(part), part) for part in effect.parts
    ]
    found = {record.index: record for batch in batches for record in batch.samples}
    records = tuple(found.get(entry.index) or _missing_record(entry) for entry in effect.entries)
    rollout = effect.spec.template.rollout
    failed_rewards = rollout.failed_rewards if rollout else {}
    # The teacher first: while its server is away, no grader runs for nothing.
    taught, texts = await ask_teacher(
        effect.spec, records, teachers=ports.teachers, secrets=ports.secrets
    )
    graded, left = await _call_grader(
        effect.spec, [r for r in records if _is_scored(r, failed_rewards)], ports
    )
    hint = await _fill_hint(effect.spec, ports)
    if (left, hint) == (None, None) and len(batches) == 1 and batches[0].samples == taught:
        artifact = effect.parts[0]
    else:
        output = await store_output(left, ports.artifacts, run=effect.spec.owner) if left else None
        whole = SampleBatch(
            group=effect.spec.group,
            samples=taught,
            grader_output=output,
            teacher_hint=hint,
            teacher_tokens=texts,
        )
        data = whole.model_dump_json().encode()
        artifact = await ports.artifacts.put_artifact(data, run=effect.spec.owner)
    by_index = {grade.index: grade for grade in graded}
    scoring = rollout.reward_models if rollout else ()
    checked = [
        (r, add_model_scores(_validate_grade(r, by_index.get(r.index), len(records)), r, scoring))
        for r in records
    ]
    questions = {grade.index: grade.questions for grade in graded}
    grades, judgements = await judge_group(effect.spec, checked, questions, ports)
    scored = GroupScored(
        effect=effect,
        group_artifact=artifact,
        grades=tuple(
            _fixed_grade(r, failed_rewards) or _validate_grade(r, g, len(records))
            for r, g in zip(records, grades, strict=True)
        ),
    )
    return await _with_judgements(scored, judgements, ports) if judgements else scored


async def _fill_hint(spec: GroupSpec, ports: GradePorts) -> str | None:
    """The hint that the teacher of the run reads, if it reads one."""
    hint = spec.template.teacher_hint
    if hint is None:
        return None
    return fill_hint(hint, (await ports.datasets.rows(spec.template.dataset))[spec.row].label)


async def _with_judgements(
    scored: GroupScored, judgements: tuple[Judgement, ...], ports: GradePorts
) -> GroupScored:
    spec = scored.effect.spec
    data = JudgementBatch(group=spec.group, judgements=judgements).model_dump_json().encode()
    usage = sum((judgement.usage for judgement in judgements), JudgeUsage())
    artifact = await ports.artifacts.put_artifact(data, run=spec.owner)
    return replace(scored, judgements=artifact, judged=usage)


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
        if not _is_usable(reward):
            message = (
                f"the score {found.score:g} of the reward model {model.name}, times its weight "
                f"{model.weight:g}, makes the reward {reward:g}; set a smaller weight in "
                "advanced.reward_models"
            )
            failure = SampleFailure(category=FailureCategory.GRADER, message=message)
            return grade.model_copy(update={"reward": None, "failure": failure})
    return grade.model_copy(update={"reward": reward, "parts": parts})


def _parse_batch(data: bytes, ref: ArtifactRef) -> SampleBatch:
    try:
        return SampleBatch.model_validate_json(data)
    except ValidationError as error:
        raise CorruptData(f"{ref.uri} does not hold samples: {error}") from error


def _missing_record(entry: SampleEntry) -> SampleRecord:
    """Return a record for a sample that failed and is therefore in no part. Its entry has the reason."""
    failure = SampleFailure(
        category=FailureCategory(entry.failure or FailureCategory.INTERNAL),
        message=entry.message or "the sample was lost",
    )
    return SampleRecord(index=entry.index, failure=failure)


async def _call_grader(
    spec: GroupSpec, samples: Sequence[SampleRecord], ports: GradePorts
) -> tuple[tuple[Grade, ...], UserOutput | None]:
    """Return the grades of the user's grader, and what it left behind. If the grader fails, every grade
    carries that failure. A grader that takes too long is a failure of the grader; `timeout` is that of
    a sample."""
    rollout = spec.template.rollout
    if rollout is None or not samples:
        return (), None
    if rollout.is_scored_by_models:
        return tuple(Grade(index=sample.index, reward=0.0) for sample in samples), None
    if rollout.kind == "server":
        return tuple(sample.grade for sample in samples if sample.grade is not None), None
    row = (await ports.datasets.rows(spec.template.dataset))[spec.row]
    try:
        owner = await sandbox_owner(spec, rollout, ports.secrets)
        result = await until_uninterrupted(
            lambda: ports.user.grade(
                rollout,
                owner=owner,
                group=spec.group,
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


def _is_scored(record: SampleRecord, failed: Mapping[str, float | str]) -> bool:
    """Whether the grader scores a sample: it did not fail, or the run asks for it."""
    return record.failure is None or failed.get(record.failure.category) == "grade"


def _fixed_grade(record: SampleRecord, failed: Mapping[str, float | str]) -> Grade | None:
    """The grade of a sample that failed in a way for which the run has a number, else None. No judge is
    asked about it."""
    reward = failed.get(record.failure.category) if record.failure else None
    if not isinstance(reward, int | float):
        return None
    return Grade(index=record.index, reward=float(reward))


def _validate_grade(record: SampleRecord, grade: Grade | None, num_samples: int) -> Grade:
    """Return the sample's grade as it enters the log: a finite reward, or None and the reason."""
    if grade is None:
        failure = record.failure or SampleFailure(
            category=FailureCategory.VALIDATION, message="the grader returned no reward"
        )
        grade = Grade(index=record.index, reward=None, failure=failure)
    reward, failed = grade.reward, grade.failure
    named = {"reward": reward} if reward is not None else {}
    named |= {f"reward {name!r}": part for name, part in grade.parts.items()}
    unusable = [
        f"the {name} is {value!r}" for name, value in named.items() if not _is_usable(value)
    ]
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
        parts={name: float(part) for name, part in grade.parts.items() if _is_usable(part)},
        failure=failed,
    )


def _is_usable(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= LARGEST_REWARD


CONSUMER: Consumer[GradeState, GroupGraded, GradeMessage, GradeGroup, GradePorts] = Consumer(
    name=ConsumerName("grade"),
    category="grade",
    reads=(GroupGenerated,),
    emits=(GroupGraded,),
    effects=(GradeGroup,),
    initial=GradeState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=GradePorts,
)
