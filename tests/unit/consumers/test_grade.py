"""The grade consumer grades every group once, and every sample of the group gets a grade."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from consumers.grade import CONSUMER, NO_SAMPLES, perform
from consumers.user_code import interrupted_calls
from infra.ports.services import GraderResult, UserCodeRaised, UserOutput
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetRow
from schemas.effects import Failed, GradeGroup, GroupScored
from schemas.errors import CallInterrupted, CorruptData, FailureCategory, UserCodeError
from schemas.events import GroupGenerated, GroupGraded
from schemas.ids import grade_stream
from schemas.sampling import (
    Grade,
    JudgeUsage,
    Message,
    SampleBatch,
    SampleFailure,
    SampleOutput,
    SampleRecord,
)
from schemas.specs import SampleEntry
from tests.kit.decider import given
from tests.kit.fakes import FakeUserCode, Grader, bench
from tests.kit.specs import entry, group_spec, ref, template

SPEC = group_spec(template())
STREAM = grade_stream(SPEC.group)
ENTRIES = (entry(0), entry(1))
GENERATED = GroupGenerated(spec=SPEC, entries=ENTRIES, parts=(ref("group"),))
EFFECT = GradeGroup(spec=SPEC, parts=(ref("group"),), entries=ENTRIES)
GRADES = (Grade(index=0, reward=1.0), Grade(index=1, reward=0.5))
SCORED = GroupScored(EFFECT, group_artifact=ref("group"), grades=GRADES)
GRADED = GroupGraded(spec=SPEC, artifact=ref("group"), entries=ENTRIES, grades=GRADES)


def test_a_generated_group_is_graded() -> None:
    given(CONSUMER).when(GENERATED).then(effects=[EFFECT])


def test_a_graded_group_is_not_graded_again() -> None:
    given(CONSUMER, GRADED).when(GENERATED).then_nothing()


def test_the_scores_are_recorded_once() -> None:
    given(CONSUMER).when(SCORED, stream=STREAM).then(events=[GRADED])
    given(CONSUMER, GRADED).when(SCORED, stream=STREAM).then_nothing()


def test_judgements_are_recorded_with_the_scores() -> None:
    usage = JudgeUsage(calls=2, tokens=9, usd=0.25)
    judged = {"judgements": ref("judgements"), "judged": usage}
    graded = GRADED.model_copy(update=judged)
    given(CONSUMER).when(
        replace(SCORED, judgements=ref("judgements"), judged=usage), stream=STREAM
    ).then(events=[graded])
    assert GroupGraded.model_validate_json(graded.model_dump_json()) == graded
    assert "judge" not in GRADED.model_dump_json()


@pytest.mark.parametrize(
    ("parts", "artifact"),
    [((ref("group"),), ref("group")), ((ref("p0"), ref("p1")), ref("p0")), ((), NO_SAMPLES)],
)
def test_a_grading_that_is_given_up_leaves_every_reward_out(
    parts: tuple[ArtifactRef, ...], artifact: ArtifactRef
) -> None:
    effect = EFFECT.model_copy(update={"parts": parts})
    failed = Failed(effect, FailureCategory.CRASH, "died 20 times")
    failure = SampleFailure(category=FailureCategory.CRASH, message="died 20 times")
    grades = tuple(Grade(index=index, reward=None, failure=failure) for index in (0, 1))
    graded = GroupGraded(spec=SPEC, artifact=artifact, entries=ENTRIES, grades=grades)
    given(CONSUMER).when(failed, stream=STREAM).then(events=[graded])
    given(CONSUMER, GRADED).when(failed, stream=STREAM).then_nothing()


ROW = DatasetRow(prompt=(Message(role="user", content="Say 3"),), label="3")
LOST = SampleFailure(category=FailureCategory.TIMEOUT, message="took longer than 450 s")


def record(index: int, *, failure: SampleFailure | None = None) -> SampleRecord:
    return SampleRecord(index=index, text=f"answer {index}", failure=failure)


async def score(
    directory: Path,
    grader: Grader,
    *parts: tuple[SampleRecord, ...],
    entries: tuple[SampleEntry, ...] = ENTRIES,
    user_code: bool = True,
    failed_rewards: Mapping[str, float | str] | None = None,
    left: list[SampleOutput | None] | None = None,
) -> tuple[GroupScored, tuple[SampleRecord, ...], FakeUserCode]:
    """Grade a group whose samples lie in these parts; return the outcome and the artifact's
    samples."""
    user = FakeUserCode(grader=grader)
    world = bench(directory, user=user)
    of = template(dataset=await world.dataset(ROW), user_code=user_code)
    if failed_rewards and of.rollout:
        rollout = of.rollout.model_copy(update={"failed_rewards": failed_rewards})
        of = of.model_copy(update={"rollout": rollout})
    spec = group_spec(of, row=0)
    refs = []
    for samples in parts:
        data = SampleBatch(group=spec.group, samples=samples).model_dump_json().encode()
        refs.append(await world.ports.artifacts.put_artifact(data, run="r1"))
    effect = GradeGroup(spec=spec, parts=tuple(refs), entries=entries)
    outcome = await perform(effect, world.ports)
    data = await world.ports.artifacts.get_artifact(outcome.group_artifact)
    batch = SampleBatch.model_validate_json(data)
    if left is not None:
        left.append(batch.grader_output)
    return outcome, batch.samples, user


def by_text(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
    assert label == "3"
    return tuple(Grade(index=s.index, reward=float(s.text[-1]), parts={"p": 1}) for s in samples)


async def test_a_group_in_one_part_keeps_its_artifact(tmp_path: Path) -> None:
    outcome, samples, _ = await score(tmp_path, by_text, (record(0), record(1)))
    assert outcome.group_artifact == outcome.effect.parts[0]
    assert outcome.grades == (
        Grade(index=0, reward=0.0, parts={"p": 1}),
        Grade(index=1, reward=1.0, parts={"p": 1}),
    )
    assert samples == (record(0), record(1))


async def test_output_of_a_grader_is_kept_with_its_group(tmp_path: Path) -> None:
    def printing(label: str | None, samples: Sequence[SampleRecord]) -> GraderResult:
        return GraderResult(by_text(label, samples), UserOutput(stdout="graded"))

    def raising(label: str | None, samples: Sequence[SampleRecord]) -> GraderResult:
        output = UserOutput(traceback="KeyError")
        raise UserCodeRaised(FailureCategory.GRADER, "KeyError", output=output)

    for grader, output in (
        (printing, SampleOutput(stdout="graded")),
        (raising, SampleOutput(traceback="KeyError")),
    ):
        left: list[SampleOutput | None] = []
        outcome, samples, _ = await score(tmp_path, grader, (record(0), record(1)), left=left)
        assert outcome.group_artifact != outcome.effect.parts[0]
        assert (samples, left) == ((record(0), record(1)), [output])


async def test_parts_are_put_together_in_index_order(tmp_path: Path) -> None:
    outcome, samples, _ = await score(tmp_path, by_text, (record(1),), (record(0),))
    assert samples == (record(0), record(1))
    assert [grade.reward for grade in outcome.grades] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("chosen", "seen", "reward"),
    [
        ({"timeout": -0.5}, [1], -0.5),
        ({"timeout": "grade"}, [0, 1], 0.0),
        ({"agent_error": -0.5}, [1], None),
    ],
)
async def test_a_run_may_say_what_a_failed_sample_is_worth(
    tmp_path: Path, chosen: dict[str, float | str], seen: list[int], reward: float | None
) -> None:
    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        assert [sample.index for sample in samples] == seen
        return by_text(label, samples)

    of = (record(0, failure=LOST), record(1))
    outcome, _, _ = await score(tmp_path, grader, of, failed_rewards=chosen)
    assert [grade.reward for grade in outcome.grades] == [reward, 1.0]
    assert (outcome.grades[0].failure is None) == (reward is not None)


async def test_a_failed_sample_is_not_graded_and_keeps_its_reason(tmp_path: Path) -> None:
    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        assert [sample.index for sample in samples] == [1]
        return by_text(label, samples)

    outcome, _, _ = await score(tmp_path, grader, (record(0, failure=LOST), record(1)))
    assert outcome.grades[0] == Grade(index=0, reward=None, failure=LOST)
    assert outcome.grades[1].reward == 1.0


async def test_a_sample_that_is_in_no_part_failed_as_its_entry_says(tmp_path: Path) -> None:
    entries = (entry(0, failure="crash", message="died 20 times"), entry(1))
    outcome, samples, _ = await score(tmp_path, by_text, (record(1),), entries=entries)
    lost = SampleFailure(category=FailureCategory.CRASH, message="died 20 times")
    assert samples == (SampleRecord(index=0, failure=lost), record(1))
    assert outcome.grades[0] == Grade(index=0, reward=None, failure=lost)


async def test_a_group_that_failed_whole_needs_no_grader(tmp_path: Path) -> None:
    entries = (entry(0, failure="crash"), entry(1, failure="timeout", message="too slow"))
    outcome, samples, user = await score(tmp_path, by_text, entries=entries)
    assert user.num_gradings == 0
    assert [grade.reward for grade in outcome.grades] == [None, None]
    assert [s.failure.category for s in samples if s.failure] == ["crash", "timeout"]


async def test_a_grader_that_fails_as_a_whole_leaves_every_reward_out(tmp_path: Path) -> None:
    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        raise UserCodeError(FailureCategory.GRADER, "main.py:9: KeyError: 'x'")

    outcome, _, _ = await score(tmp_path, grader, (record(0), record(1)))
    failure = SampleFailure(category=FailureCategory.GRADER, message="main.py:9: KeyError: 'x'")
    assert outcome.grades == tuple(Grade(index=i, reward=None, failure=failure) for i in (0, 1))


async def test_a_grader_whose_process_ended_is_asked_again_by_the_same_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupted_calls, "PAUSES_S", (0.0, 0.0, 0.0))
    left = iter([CallInterrupted("its process ended")] * 3)

    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        for error in left:
            raise error
        raise UserCodeError(FailureCategory.PROCESS, "its process ended whenever it ran alone")

    outcome, _, user = await score(tmp_path, grader, (record(0), record(1)))
    assert user.num_gradings == 4
    assert {g.failure.category for g in outcome.grades if g.failure} == {FailureCategory.PROCESS}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1_000_001, -1e200, "1", [1]])
async def test_a_reward_that_is_no_finite_number_is_left_out_never_zero(
    tmp_path: Path, reward: object
) -> None:
    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        odd = Grade.model_construct(index=0, reward=reward, parts={"p": reward})
        return (odd, Grade(index=1, reward=1.0))

    outcome, _, _ = await score(tmp_path, grader, (record(0), record(1)))
    assert outcome.grades[0].reward is None
    assert outcome.grades[0].parts == {}
    assert outcome.grades[0].failure is not None
    assert outcome.grades[0].failure.category is FailureCategory.GRADER
    assert f"reward 'p' is {reward!r}; return a finite number" in outcome.grades[0].failure.message
    assert "-1,000,000 to 1,000,000" in outcome.grades[0].failure.message
    assert outcome.grades[1] == Grade(index=1, reward=1.0)


async def test_a_reward_of_a_million_is_taken_and_a_larger_part_is_named(tmp_path: Path) -> None:
    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        return (Grade(index=0, reward=-1e6), Grade(index=1, reward=1.0, parts={"length": 2e6}))

    outcome, _, _ = await score(tmp_path, grader, (record(0), record(1)))
    assert outcome.grades[0].reward == -1e6
    assert outcome.grades[1].reward is None
    assert outcome.grades[1].failure is not None
    assert outcome.grades[1].failure.message.startswith("the reward 'length' is 2000000.0")


async def test_a_sample_the_grader_forgot_is_left_out_with_the_reason(tmp_path: Path) -> None:
    outcome, _, _ = await score(
        tmp_path, lambda _, s: (Grade(index=1, reward=1.0),), (record(0), record(1))
    )
    assert outcome.grades[0].failure is not None
    assert "no reward" in outcome.grades[0].failure.message


async def test_without_user_code_nothing_is_graded(tmp_path: Path) -> None:
    outcome, _, user = await score(tmp_path, by_text, (record(0), record(1)), user_code=False)
    assert user.num_gradings == 0
    assert [grade.reward for grade in outcome.grades] == [None, None]


async def test_a_part_that_holds_no_samples_is_named(tmp_path: Path) -> None:
    world = bench(tmp_path, user=FakeUserCode(grader=by_text))
    part = await world.ports.artifacts.put_artifact(b"[]", run="r1")
    with pytest.raises(CorruptData, match="does not hold samples"):
        await perform(EFFECT.model_copy(update={"parts": (part,)}), world.ports)
