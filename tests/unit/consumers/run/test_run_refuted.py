"""The run consumer has groups with refuted samples generated again, and fences the servers that made
them."""

from typing import Any
from uuid import UUID

import pytest

from consumers.run.refuted import FENCED_AFTER, MOST_IN_A_ROW
from schemas.events import (
    BatchAssembled,
    GroupsRequested,
    GroupsSettled,
    RunPaused,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    RunWarned,
    SampleRefuted,
)
from schemas.events.decider_version import ATTESTS
from schemas.ids import REFUTED, sample_id
from schemas.specs import GroupSpec
from tests.kit.decider import When
from tests.unit.consumers.runs import Story, graded, only, requested, synced, updated

URL = "http://liar:8000"


def begun(**advanced: Any) -> tuple[Story, tuple[GroupSpec, ...]]:
    """A run whose first batch is with the learner, and the groups of that batch."""
    request = requested(advanced=advanced).model_copy(update={"decider": ATTESTS})
    story = Story(request)
    (first,) = only(story.begin(), GroupsRequested)
    specs = first.group_specs()
    for spec in specs:
        story.tell(graded(spec))
    return story, specs


def refuted(*specs: GroupSpec, attempt: int = 1, server: str = URL) -> SampleRefuted:
    """Sample 1 of the first of these groups; the others hold refuted samples too."""
    key = specs[0].group_key
    return SampleRefuted(
        run="r1",
        step=key.step,
        batch=UUID(int=attempt),
        sample=sample_id(key.id, 1),
        server=server,
        servers=(server,),
        policy_version=key.step - 1,
        test="distance",
        tokens=9,
        log_e=30.0,
        distance=0.1,
        slots=tuple(sorted(spec.group_key.slot for spec in specs)),
        attempt=attempt,
    )


def again(said: When) -> GroupsRequested:
    (request,) = only(said, GroupsRequested)
    return request


def test_only_the_refuted_group_is_generated_again_with_its_row_and_its_draws() -> None:
    story, (one, two) = begun()
    said = story.tell(refuted(two)).then_types(RunWarned, GroupsRequested)
    (spec,) = again(said).group_specs()
    assert spec.group == f"{two.group.rpartition('-')[0]}-{REFUTED}"
    assert (spec.row, spec.template.policy) == (two.row, two.template.policy)
    assert spec.draw_key(3) == two.draw_key(3)
    assert spec.template.avoid == (URL,)
    _, batch = story.tell(graded(spec)).then_types(GroupsSettled, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert [(group.slot, group.replacement) for group in batch.groups] == [(0, 0), (1, REFUTED)]
    assert one.draw_key(0) != spec.draw_key(0)


def test_the_metrics_of_the_step_are_those_of_a_run_without_refuted_samples() -> None:
    honest, _ = begun()
    (expected,) = [e for e in honest.told if isinstance(e, BatchAssembled)]
    story, (_, two) = begun()
    (spec,) = again(story.tell(refuted(two))).group_specs()
    (_, batch) = story.tell(graded(spec)).events
    assert isinstance(batch, BatchAssembled)
    assert batch.metrics == expected.metrics
    assert [group.rewards for group in batch.groups] == [g.rewards for g in expected.groups]


def test_other_events_about_the_same_batch_change_nothing() -> None:
    story, (one, two) = begun()
    message = refuted(one, two)
    request = again(story.tell(message))
    assert [slot.slot for slot in request.slots] == [0, 1]
    other = message.model_copy(update={"sample": sample_id(two.group_key.id, 0)})
    story.tell(other).then_nothing()
    for spec in request.group_specs():
        story.tell(graded(spec))
    story.tell(other).then_nothing()


def test_the_refuted_group_is_not_settled_a_second_time() -> None:
    story, (_, two) = begun()
    story.tell(refuted(two))
    story.tell(graded(two)).then_nothing()


def refute_in_a_row(story: Story, spec: GroupSpec, times: int) -> tuple[GroupSpec, list[When]]:
    said = []
    for attempt in range(1, times + 1):
        said.append(story.tell(refuted(spec, attempt=attempt)))
        (spec,) = again(said[-1]).group_specs()
        if attempt < times:
            story.tell(graded(spec))
    return spec, said


def test_a_server_is_fenced_after_several_batches_and_the_run_says_so() -> None:
    story, (_, two) = begun()
    spec, said = refute_in_a_row(story, two, FENCED_AFTER + 1)
    warnings = [only(one, RunWarned) for one in said]
    assert [len(found) for found in warnings] == [1] * FENCED_AFTER + [0]
    assert {found[0].category for found in warnings[:FENCED_AFTER]} == {URL}
    assert "is fenced" in warnings[FENCED_AFTER - 1][0].message
    story.tell(graded(spec))
    request = again(story.tell(updated(1)))
    assert request.step == 2
    assert request.template.avoid == (URL,)


def test_twin_a_server_with_one_bad_batch_is_not_fenced() -> None:
    story, (_, two) = begun()
    (spec,) = again(story.tell(refuted(two))).group_specs()
    story.tell(graded(spec))
    assert again(story.tell(updated(1))).template.avoid == ()


def test_a_run_whose_samples_are_always_refuted_pauses_and_goes_on_when_resumed() -> None:
    story, (_, two) = begun()
    spec, said = refute_in_a_row(story, two, MOST_IN_A_ROW)
    (paused,) = only(said[-1], RunPaused)
    assert paused.reason is not None
    assert "5 times in a row" in paused.reason
    assert URL in paused.reason
    assert not any(only(one, RunPaused) for one in said[:-1])
    story.tell(RunResumeRequested(run="r1")).then_types(RunResumed)
    story.tell(graded(spec)).then_types(GroupsSettled, BatchAssembled)
    warned = story.tell(refuted(spec, attempt=MOST_IN_A_ROW + 1))
    assert len(only(warned, RunWarned)) == 1, "the counts of servers begin again"


def test_a_stop_ends_a_run_whose_samples_are_refuted() -> None:
    story, (_, two) = begun()
    story.tell(RunStopRequested(run="r1")).then_nothing()
    said = story.tell(refuted(two))
    assert only(said, RunStopped)


@pytest.mark.parametrize(
    ("decider", "advanced", "attests"),
    [
        (ATTESTS, {}, True),
        (ATTESTS, {"attest": False}, False),
        (ATTESTS - 1, {}, False),
        (ATTESTS, {"algorithm": "distill", "teacher": "self"}, False),
    ],
)
def test_new_runs_attest_unless_their_config_says_otherwise(
    decider: int, advanced: dict[str, Any], *, attests: bool
) -> None:
    story = Story(requested(advanced=advanced).model_copy(update={"decider": decider}))
    (started,) = only(story.tell(synced()), RunStarted)
    assert started.spec.attests == attests
    assert ("attests" in started.spec.model_dump()) == attests
