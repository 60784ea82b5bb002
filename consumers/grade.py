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
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from consumers.judging.panel import judge_group
from consumers.judging.teacher_logprobs import ask_teacher
from consumers.stored_files import store_output
from consumers.user_code.grading import (
    GraderPorts,
    call_grader,
    complete_grades,
    is_scored,
    missing_record,
    parse_batch,
)
from infra.ports.teachers import Teachers
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.costs.work import add_spent, spent_by
from schemas.effects import Failed, GradeGroup, GroupScored
from schemas.events import GroupGenerated, GroupGraded
from schemas.ids import ConsumerName, StreamName, grade_stream
from schemas.models.teacher import fill_hint
from schemas.sampling import (
    Grade,
    Judgement,
    JudgementBatch,
    JudgeUsage,
    SampleBatch,
    SampleFailure,
)
from schemas.specs import GroupSpec

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
            effect = GradeGroup(
                spec=spec,
                parts=parts,
                entries=entries,
                generate_s=message.seconds,
                spent=message.spent,
            )
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
        work=meta.work,
        spent=add_spent([effect.spent, spent_by([meta.work])]),
    )


def routes(message: GradeMessage) -> tuple[StreamName, ...]:
    """Return the grade stream of the message's group."""
    return (grade_stream(message.spec.group),) if isinstance(message, GroupGenerated) else ()


@dataclass(frozen=True, slots=True)
class GradePorts(GraderPorts):
    """The ports of a grader, and the teachers on servers."""

    teachers: Teachers


async def perform(effect: GradeGroup, ports: GradePorts) -> GroupScored:
    """Read the samples, grade those that did not fail, and store all of them in one artifact, with what
    a teacher on a server says about them. Returns the artifact and the grades. Raises TransientError
    when the sandbox or the teacher is gone, CorruptData when a part cannot be read."""
    batches = [parse_batch(await ports.artifacts.get_artifact(part), part) for part in effect.parts]
    found = {record.index: record for batch in batches for record in batch.samples}
    records = tuple(found.get(entry.index) or missing_record(entry) for entry in effect.entries)
    rollout = effect.spec.template.rollout
    failed_rewards = rollout.failed_rewards if rollout else {}
    # The teacher first: while its server is away, no grader runs for nothing.
    taught, texts = await ask_teacher(
        effect.spec, records, teachers=ports.teachers, secrets=ports.secrets
    )
    graded, left = await call_grader(
        effect.spec, [r for r in records if is_scored(r, failed_rewards)], ports
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
    grades, judgements = await complete_grades(
        effect.spec, records, graded, partial(judge_group, effect.spec, ports=ports)
    )
    scored = GroupScored(effect=effect, group_artifact=artifact, grades=grades)
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
