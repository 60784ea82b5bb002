"""Grades a part of the recorded groups of a run again.

A part is read from the log page by page, and of each group only what is counted is kept, so memory does
not grow with the run. Many groups are with the grader's process at the same time.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pydantic import ValidationError
from pydantic_core import from_json

from consumers.judging.panel import add_scores, judge_group
from consumers.regrade.weights import (
    Weighing,
    code_grade,
    reweigh_grade,
    weigh_own_reward,
)
from consumers.user_code.grading import (
    GraderPorts,
    Judged,
    call_grader,
    complete_grades,
    is_scored,
    missing_record,
    validate_grade,
)
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import Cursor, EventStore
from schemas.artifact_refs import ArtifactRef
from schemas.effects import GroupsRegraded, RegradeGroups
from schemas.errors import CorruptData, NotFound, Refused
from schemas.events import GroupGraded, RegradePartGraded, RegradeRequested, UngradedSample
from schemas.events.regrades.figures import (
    Disagreement,
    RegradeSums,
    add_by_step,
    sums_of,
    worst_of,
)
from schemas.events.regrades.groups import GRADER_PART, RegradedGroup, RegradedGroups
from schemas.ids import GroupId, Purpose, grade_stream, regrade_stream, sample_id
from schemas.sampling import Grade, Judgement, SampleBatch, SampleFailure, SampleRecord
from schemas.specs import GroupSpec, RolloutRef

PART_SAMPLES = 4096
"""A part ends with the group that brings it to so many samples."""

PART_STEPS = 32
"""The most steps of a part, because its event has the sums of each."""

PAGE = 64
"""How many groups are read from the log at once."""

AT_ONCE = 32
"""How many groups are graded at the same time."""

MOST_WORST, MOST_UNGRADED, LONGEST_MESSAGE = 20, 10, 300
"""How many disagreements and samples without a reward a report lists, and characters of each reason."""


@dataclass(frozen=True, slots=True)
class RegradePorts(GraderPorts):
    """The ports of a grader, and the log with the recorded groups."""

    log: EventStore


@dataclass(frozen=True, slots=True)
class PriorGroup:
    """A group as the log has it, with the grades that count as those before."""

    graded: GroupGraded
    before: tuple[Grade, ...]


@dataclass
class PartFigures:
    """The figures of a part, which grow group by group."""

    request: RegradeRequested
    by_step: dict[int, RegradeSums] = field(default_factory=dict)
    worst: tuple[Disagreement, ...] = ()
    ungraded: list[UngradedSample] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, group: RegradedGroup) -> None:
        """Count a group."""
        before = [grade.reward for grade in group.before]
        after = [grade.reward for grade in group.after]
        sums = sums_of(
            before,
            after,
            threshold=self.request.threshold,
            compares_groups=self.request.compares_groups,
        )
        self.by_step = add_by_step(self.by_step, {group.step: sums})
        found = list(self.worst)
        for old, new in zip(group.before, group.after, strict=True):
            sample = sample_id(GroupId(group.group), new.index)
            if old.reward is not None and new.reward is not None:
                found.append(
                    Disagreement(
                        sample=sample, step=group.step, before=old.reward, after=new.reward
                    )
                )
            elif new.failure is not None and new.failure != old.failure:
                self._add_failure(sample, group.step, old.reward, new.failure)
        self.worst = worst_of(found, most=MOST_WORST)

    def _add_failure(
        self, sample: str, step: int, before: float | None, failure: SampleFailure
    ) -> None:
        self.failures[str(failure.category)] += 1
        if len(self.ungraded) < MOST_UNGRADED:
            self.ungraded.append(
                UngradedSample(
                    sample=sample,
                    step=step,
                    before=before,
                    category=str(failure.category),
                    message=failure.message[:LONGEST_MESSAGE],
                )
            )


async def regrade_part(effect: RegradeGroups, ports: RegradePorts) -> GroupsRegraded:
    """Grade the groups of a part again, store their grades in one artifact, and return its figures.
    Raises Refused when the history or an artifact of the run is gone, and what the ports raise."""
    request = effect.request
    figures, kept = PartFigures(request), list[RegradedGroup]()
    num_samples, place = 0, effect.after
    following: str | None = place
    while (
        following is not None and num_samples < PART_SAMPLES and len(figures.by_step) < PART_STEPS
    ):
        recorded, following = await _read_page(effect, following, ports)
        room = asyncio.Semaphore(AT_ONCE)
        regraded = await asyncio.gather(*(_regrade(effect, one, ports, room) for one in recorded))
        for group in regraded:
            figures.add(group)
            kept.append(group)
            num_samples += len(group.after)
    data = RegradedGroups(groups=tuple(kept)).model_dump_json(exclude_defaults=True).encode()
    artifact = await ports.artifacts.put_artifact(data, run=effect.run)
    return GroupsRegraded(
        effect=effect,
        artifact=artifact,
        by_step=figures.by_step,
        worst=figures.worst,
        ungraded=tuple(figures.ungraded),
        failures=dict(sorted(figures.failures.items())),
        following=following,
    )


async def _read_page(
    effect: RegradeGroups, place: str, ports: RegradePorts
) -> tuple[list[PriorGroup], str | None]:
    """The recorded groups of a page that the regrade is about, and where the next page begins."""
    if effect.request.base is not None:
        return await _read_base_page(effect.request, effect.request.base, place, ports)
    cursor = Cursor.parse(place) if place else Cursor()
    page = await ports.log.read(effect.run, after=cursor, limit=PAGE, types=[GroupGraded.type])
    events = [recorded.event for recorded in page]
    found = [
        PriorGroup(event, _in_order(event, event.grades))
        for event in events
        if isinstance(event, GroupGraded) and is_chosen(event.spec, effect.request)
    ]
    return found, str(page[-1].cursor) if len(page) == PAGE else None


async def _read_base_page(
    request: RegradeRequested, base: str, place: str, ports: RegradePorts
) -> tuple[list[PriorGroup], str | None]:
    """A part of another regrade as a page. Its new grades are those before."""
    number, stream = int(place or 1), regrade_stream(base)
    recorded = (await ports.log.load({stream: 0}))[stream]
    parts = {r.event.number: r.event for r in recorded if isinstance(r.event, RegradePartGraded)}
    if number not in parts:
        return [], None
    groups = [
        group
        for group in (await read_groups(parts[number].artifact, ports.artifacts)).groups
        if is_chosen_group(GroupId(group.group), group.step, request)
    ]
    streams = {grade_stream(group.group): 0 for group in groups}
    loaded = await ports.log.load(streams) if streams else {}
    found = []
    for group in groups:
        events = [r.event for r in loaded[grade_stream(group.group)]]
        graded = next((event for event in events if isinstance(event, GroupGraded)), None)
        if graded is None:
            raise Refused(f"group {group.group} is not in the log any more; regrade a run that is")
        found.append(PriorGroup(graded, group.after))
    return found, str(number + 1) if number + 1 in parts else None


async def read_groups(ref: ArtifactRef, artifacts: Artifacts) -> RegradedGroups:
    """Return the regraded groups of an artifact. Raises CorruptData when it does not hold them."""
    try:
        return RegradedGroups.model_validate_json(await artifacts.get_artifact(ref))
    except ValidationError as error:
        raise CorruptData(f"{ref.uri} does not hold regraded groups: {error}") from error


def is_chosen(spec: GroupSpec, request: RegradeRequested) -> bool:
    """Whether a regrade is about a group of its run."""
    key = spec.group_key
    return key.purpose == Purpose.TRAIN and is_chosen_group(key.id, key.step, request)


def is_chosen_group(group: GroupId, step: int, request: RegradeRequested) -> bool:
    """Whether a group is in the steps and in the share of a regrade. The share depends on the group's
    name alone, so that two regrades with the same share are about the same groups."""
    if request.steps is not None and not request.steps[0] <= step <= request.steps[1]:
        return False
    drawn = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big")
    return drawn < request.share * 2**64


def _in_order(event: GroupGraded, grades: Sequence[Grade]) -> tuple[Grade, ...]:
    """The grades in the order of the samples."""
    by_index = {grade.index: grade for grade in grades}
    return tuple(
        by_index.get(entry.index) or Grade(index=entry.index, reward=None)
        for entry in event.entries
    )


async def _regrade(
    effect: RegradeGroups, recorded: PriorGroup, ports: RegradePorts, room: asyncio.Semaphore
) -> RegradedGroup:
    async with room:
        event, request = recorded.graded, effect.request
        again = request.config is not None or bool(request.rubrics)
        after = await _grade_again(effect, recorded, ports) if again else _reweigh(effect, recorded)
        return RegradedGroup(
            group=event.spec.group,
            step=event.spec.group_key.step,
            before=recorded.before,
            after=after,
        )


def _reweigh(effect: RegradeGroups, recorded: PriorGroup) -> tuple[Grade, ...]:
    """The grades of a group with other weights. Nothing is called, and no samples are read."""
    old, new = _weighings(effect)
    number, fixed = len(recorded.before), effect.request.rollout.failed_rewards
    return tuple(
        grade
        if isinstance(fixed.get(entry.failure or ""), int | float)
        else validate_grade(SampleRecord(index=grade.index), reweigh_grade(grade, old, new), number)
        for grade, entry in zip(recorded.before, recorded.graded.entries, strict=True)
    )


def _weighings(effect: RegradeGroups) -> tuple[Weighing, Weighing]:
    """How the grades before were weighed, and how the new ones are."""
    request = effect.request
    own = request.weights.get(GRADER_PART, request.base_weight)
    return Weighing(request.rollout, request.base_weight), Weighing(effect.rollout, own)


async def _grade_again(
    effect: RegradeGroups, recorded: PriorGroup, ports: RegradePorts
) -> tuple[Grade, ...]:
    """The grades of a group by the code and the judges of the regrade."""
    event, request, rollout = recorded.graded, effect.request, effect.rollout
    template = event.spec.template.model_copy(update={"rollout": rollout, "run": effect.regrade})
    spec = event.spec.model_copy(update={"template": template})
    records = await _read_records(event, ports)
    scored = [record for record in records if is_scored(record, rollout.failed_rewards)]
    old, new = _weighings(effect)
    asks = any(rubric.asks for rubric in rollout.rubrics)
    if request.config is None and not asks:
        wanted = {record.index for record in scored}
        graded = tuple(code_grade(g, old, new) for g in recorded.before if g.index in wanted)
    else:
        returned, _ = await call_grader(spec, scored, ports, on_behalf_of=effect.regrade)
        graded = weigh_own_reward(returned, new)
    judge = (
        partial(judge_group, spec, ports=ports)
        if request.rubrics or asks
        else partial(_recorded_scores, rollout, recorded.before)
    )
    grades, _ = await complete_grades(spec, records, graded, judge)
    return grades


async def _recorded_scores(
    rollout: RolloutRef,
    before: Sequence[Grade],
    graded: Sequence[tuple[SampleRecord, Grade]],
    questions: Mapping[int, Mapping[str, str]],
) -> Judged:
    """Grades with the scores that judges gave when the group was graded first."""
    recorded = {grade.index: grade.parts for grade in before}
    grades = []
    for record, grade in graded:
        parts = recorded.get(record.index, {})
        judgements = [
            Judgement(
                index=record.index,
                rubric=rubric.name,
                model=rubric.model,
                score=parts.get(rubric.name),
                problem=None
                if rubric.name in parts
                else f"no score of the rubric {rubric.name} is recorded; give --rubric to ask again",
            )
            for rubric in rollout.rubrics
        ]
        grades.append(add_scores(grade, rollout.rubrics, judgements))
    return tuple(grades), ()


async def _read_records(event: GroupGraded, ports: RegradePorts) -> tuple[SampleRecord, ...]:
    """The samples of a group without their tokens, which no grader reads and which take the most time.
    Raises Refused when they were deleted, and CorruptData."""
    if event.artifact.size == 0:
        return tuple(missing_record(entry) for entry in event.entries)
    try:
        data = await ports.artifacts.get_artifact(event.artifact)
    except NotFound as error:
        message = f"the samples of group {event.spec.group} are gone: {error.message}"
        raise Refused(f"{message}; choose other steps with --steps") from error
    try:
        content = from_json(data)
        for sample in content["samples"]:
            sample["sequences"] = ()
        batch = SampleBatch.model_validate(content)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise CorruptData(f"{event.artifact.uri} does not hold samples: {error}") from error
    found = {record.index: record for record in batch.samples}
    return tuple(found.get(entry.index) or missing_record(entry) for entry in event.entries)
