"""A regrade grades recorded groups part after part, and its report is the sum of the parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from consumers.regrade import part
from consumers.regrade.consumer import CONSUMER
from consumers.regrade.part import regrade_part
from schemas.datasets import DatasetRow
from schemas.effects import Failed, GroupsRegraded, RegradeGroups
from schemas.errors import FailureCategory, Refused
from schemas.events import (
    GroupGraded,
    RegradeCompleted,
    RegradePartGraded,
    RegradeRequested,
    RegradeStarted,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.events.regrades.figures import sums_of
from schemas.events.regrades.groups import RegradedGroups
from schemas.ids import GroupKey, Purpose, StreamName, regrade_stream
from schemas.sampling import Grade, Message, SampleBatch, SampleFailure, SampleRecord, Sequence
from schemas.specs import DiscoveredRollout, Entrypoint
from tests.kit.decider import given
from tests.kit.fakes import Bench, FakeUserCode, bench
from tests.kit.specs import config, entry, group_spec, ref, rollout_ref, template

STREAM = regrade_stream("g1")
REQUESTED = RegradeRequested(
    regrade="g1", run="r1", source="weights", rollout=rollout_ref(), weights={"grader": 2.0}
)
OF_COMMIT = RegradeRequested(
    regrade="g1",
    run="r1",
    source="commit",
    rollout=rollout_ref(),
    config=config(),
    workspace="w1",
    commit="abc1234",
)
STARTED = RegradeStarted(regrade="g1", run="r1", rollout=rollout_ref())
FIRST = RegradeGroups(
    regrade="g1", run="r1", number=1, after="", request=REQUESTED, rollout=rollout_ref()
)
SUMS = sums_of((1.0, 0.0), (2.0, 0.0), threshold=1.0)
PART = GroupsRegraded(FIRST, artifact=ref("grades"), by_step={1: SUMS}, following="1-2")


def test_a_request_without_a_commit_starts_at_once() -> None:
    given(CONSUMER).when(REQUESTED).then(events=[STARTED], effects=[FIRST])
    given(CONSUMER, REQUESTED, STARTED).when(REQUESTED).then_nothing()


def synced(**changes: Any) -> WorkspaceSynced:
    found = DiscoveredRollout(
        entrypoint=Entrypoint(rollout="say"), workflow=None, **{"grader": "Count", **changes}
    )
    return WorkspaceSynced(
        workspace="w1",
        request=UUID(int=1),
        commit="d" * 40,
        snapshot=ref("other tree"),
        rollouts=(found,),
        requester=StreamName("regrade-g1"),
    )


def test_a_grader_of_a_commit_waits_for_the_workspace() -> None:
    given(CONSUMER).when(OF_COMMIT).then_nothing()
    decided = given(CONSUMER, OF_COMMIT).when(synced())
    decided.then_types(RegradeStarted, RegradeGroups)
    started = decided.events[0]
    assert isinstance(started, RegradeStarted)
    assert (started.rollout.commit, started.rollout.grader) == ("d" * 40, "Count")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grader": None}, "has no Grader"),
        ({"grader": None, "kind": "server"}, "is a rollout server"),
        ({"error": "rollouts/say/main.py:1: SyntaxError"}, "SyntaxError"),
    ],
)
def test_a_commit_that_cannot_grade_ends_it_with_the_reason(
    changes: dict[str, Any], message: str
) -> None:
    [ended] = given(CONSUMER, OF_COMMIT).when(synced(**changes)).events
    assert isinstance(ended, RegradeCompleted)
    assert ended.status == "failed"
    assert message in (ended.message or "")


def test_a_commit_that_is_not_there_ends_it() -> None:
    rejected = WorkspaceRejected(
        workspace="w1",
        request=UUID(int=1),
        message="there is no commit abc1234",
        requester=StreamName("regrade-g1"),
    )
    [ended] = given(CONSUMER, OF_COMMIT).when(rejected).events
    assert isinstance(ended, RegradeCompleted)
    assert ended.message == "there is no commit abc1234"


def test_parts_follow_each_other_and_add_up() -> None:
    decided = given(CONSUMER, REQUESTED, STARTED).when(PART, stream=STREAM)
    decided.then_types(RegradePartGraded, RegradeGroups)
    second = decided.effects[0]
    assert isinstance(second, RegradeGroups)
    assert (second.number, second.after) == (2, "1-2")
    after = decided.after()
    after.when(PART, stream=STREAM).then_nothing()
    last = replace(PART, effect=second, following=None)
    ended = after.when(last, stream=STREAM).events[-1]
    assert isinstance(ended, RegradeCompleted)
    assert ended.report is not None
    assert (ended.report.groups, ended.report.reward_after, ended.parts) == (2, 1.0, 2)


def test_a_regrade_without_groups_fails_and_names_the_steps() -> None:
    request = REQUESTED.model_copy(update={"steps": (7, 9)})
    empty = replace(PART, by_step={}, following=None)
    ended = given(CONSUMER, request, STARTED).when(empty, stream=STREAM).events[-1]
    assert isinstance(ended, RegradeCompleted)
    assert ended.message == "there is no graded group in steps 7 to 9; choose others"


def test_a_failed_part_ends_it_with_what_was_graded_before() -> None:
    failed = Failed(FIRST, FailureCategory.INTERNAL, "the store is gone")
    [ended] = given(CONSUMER, REQUESTED, STARTED).when(failed, stream=STREAM).events
    assert isinstance(ended, RegradeCompleted)
    assert (ended.status, ended.message) == ("failed", "internal_error: the store is gone")


def test_a_part_of_a_deleted_run_decides_nothing() -> None:
    given(CONSUMER).when(PART, stream=STREAM).then_nothing()


ROW = DatasetRow(prompt=(Message(role="user", content="Say 3"),), label="3")
FAILURE = SampleFailure(category=FailureCategory.AGENT, message="it raised")


async def record_groups(world: Bench, *, number: int = 3, failed: int | None = None) -> None:
    """Record `number` groups of two samples, one for each step. The rewards are 0 and 1."""
    dataset = await world.dataset(ROW)
    for step in range(1, number + 1):
        key = GroupKey("r1", Purpose.TRAIN, step, 0)
        spec = group_spec(template(dataset=dataset), row=0)
        spec = spec.model_copy(update={"group": str(key)})
        row = Sequence(tokens=(1, 2), loss_mask=(0, 1), logprobs=(0.0, -1.0))
        samples = tuple(
            SampleRecord(
                index=index,
                text=f"answer {index}",
                sequences=(row,),
                failure=FAILURE if index == failed else None,
            )
            for index in (0, 1)
        )
        data = SampleBatch(group=spec.group, samples=samples).model_dump_json().encode()
        artifact = await world.ports.artifacts.put_artifact(data, run="r1", blob=True)
        grades = tuple(
            Grade(index=i, reward=None, failure=FAILURE)
            if i == failed
            else Grade(index=i, reward=float(i))
            for i in (0, 1)
        )
        entries = tuple(
            entry(i, failure=FailureCategory.AGENT if i == failed else None) for i in (0, 1)
        )
        await world.record(
            GroupGraded(spec=spec, artifact=artifact, entries=entries, grades=grades)
        )


def backwards(label: str | None, samples: Any) -> tuple[Grade, ...]:
    assert label == "3"
    assert not any(sample.sequences for sample in samples), "a grader reads no tokens"
    return tuple(Grade(index=s.index, reward=1.0 - s.index) for s in samples)


def effect(request: RegradeRequested = OF_COMMIT, **changes: Any) -> RegradeGroups:
    request = request.model_copy(update=changes)
    return FIRST.model_copy(update={"request": request})


async def grades_of(world: Bench, outcome: GroupsRegraded) -> RegradedGroups:
    data = await world.ports.artifacts.get_artifact(outcome.artifact)
    return RegradedGroups.model_validate_json(data)


async def test_recorded_samples_get_the_grades_of_the_new_grader(tmp_path: Path) -> None:
    world = bench(tmp_path, user=FakeUserCode(grader=backwards))
    await record_groups(world)
    outcome = await regrade_part(effect(), world.ports)
    assert outcome.following is None
    assert [sums.crossed for sums in outcome.by_step.values()] == [2, 2, 2]
    groups = (await grades_of(world, outcome)).groups
    assert [group.step for group in groups] == [1, 2, 3]
    assert [grade.reward for grade in groups[0].before] == [0.0, 1.0]
    assert [grade.reward for grade in groups[0].after] == [1.0, 0.0]
    again = await regrade_part(effect(), world.ports)
    assert again == outcome, "the same part has the same bits"


async def test_only_the_steps_and_the_share_that_are_asked_for_are_graded(tmp_path: Path) -> None:
    user = FakeUserCode(grader=backwards)
    world = bench(tmp_path, user=user)
    await record_groups(world, number=40)
    outcome = await regrade_part(effect(steps=(2, 3)), world.ports)
    assert (list(outcome.by_step), user.num_gradings) == ([2, 3], 2)
    halves = [await regrade_part(effect(share=0.5), world.ports) for _ in range(2)]
    assert halves[0] == halves[1]
    assert 10 <= len(halves[0].by_step) <= 30
    whole = await regrade_part(effect(share=1.0), world.ports)
    assert set(halves[0].by_step) < set(whole.by_step)


async def test_a_part_ends_after_enough_samples_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "PAGE", 2)
    monkeypatch.setattr(part, "PART_SAMPLES", 4)
    world = bench(tmp_path, user=FakeUserCode(grader=backwards))
    await record_groups(world)
    first = await regrade_part(effect(), world.ports)
    assert (list(first.by_step), first.following is None) == ([1, 2], False)
    following = effect().model_copy(update={"after": first.following, "number": 2})
    second = await regrade_part(following, world.ports)
    assert (list(second.by_step), second.following) == ([3], None)


async def test_a_grader_that_raises_leaves_its_samples_without_a_reward(tmp_path: Path) -> None:
    def raising(label: str | None, samples: Any) -> tuple[Grade, ...]:
        problem = SampleFailure(category=FailureCategory.GRADER, message="no file data.json")
        return (
            Grade(index=samples[0].index, reward=None, failure=problem),
            Grade(index=samples[1].index, reward=float("nan")),
        )

    world = bench(tmp_path, user=FakeUserCode(grader=raising))
    await record_groups(world, number=1)
    outcome = await regrade_part(effect(), world.ports)
    assert (outcome.by_step[1].lost, outcome.by_step[1].after) == (2, 0)
    assert outcome.failures == {"grader_error": 2}
    assert outcome.ungraded[0].message == "no file data.json"
    assert "is nan" in outcome.ungraded[1].message


async def test_a_sample_that_failed_is_not_graded(tmp_path: Path) -> None:
    def count(label: str | None, samples: Any) -> tuple[Grade, ...]:
        assert [sample.index for sample in samples] == [1]
        return (Grade(index=1, reward=0.5),)

    world = bench(tmp_path, user=FakeUserCode(grader=count))
    await record_groups(world, number=1, failed=0)
    outcome = await regrade_part(effect(), world.ports)
    assert (outcome.by_step[1].before, outcome.by_step[1].after) == (1, 1)
    assert outcome.failures == {}, "it failed before too, and for the same reason"


async def test_other_weights_read_no_samples_and_call_nothing(tmp_path: Path) -> None:
    world = bench(tmp_path, user=FakeUserCode())
    await record_groups(world, number=1)
    for path in (tmp_path / "runs" / "r1").rglob("*"):
        if path.is_file():
            path.unlink()
    outcome = await regrade_part(effect(REQUESTED), world.ports)
    assert outcome.by_step[1].total_after == 2.0
    with pytest.raises(Refused, match="samples of group r1-train-1-0-0 are gone"):
        await regrade_part(effect(), world.ports)


async def test_a_regrade_of_a_regrade_begins_with_its_grades(tmp_path: Path) -> None:
    world = bench(tmp_path, user=FakeUserCode(grader=backwards))
    await record_groups(world)
    outcome = await regrade_part(effect(), world.ports)
    await world.record(
        RegradePartGraded(
            regrade="g1",
            run="r1",
            number=1,
            artifact=outcome.artifact,
            by_step=outcome.by_step,
        )
    )
    again = effect(REQUESTED, regrade="g2", base="g1", steps=(2, 3))
    found = await regrade_part(again, world.ports)
    groups = (await grades_of(world, found)).groups
    assert [group.step for group in groups] == [2, 3]
    assert [grade.reward for grade in groups[0].before] == [1.0, 0.0]
    assert [grade.reward for grade in groups[0].after] == [2.0, 0.0]
