"""rollout: a requested group ends with exactly its samples, each recorded once."""

import pytest
from hypothesis import given as holds_for
from hypothesis import strategies as st

from consumers.rollout import CONSUMER
from schemas.errors import FailureCategory
from schemas.events import Event, GroupGenerated, GroupsRequested, SampleGenerated
from schemas.ids import Purpose, group_stream
from schemas.messages import (
    Failed,
    GenerateGroup,
    GenerateSample,
    GroupSampled,
    Outcome,
    SampleFinished,
)
from schemas.specs import GroupSpec
from tests.kit.decider import Given, given
from tests.kit.specs import entry, group_spec, ref, slots, template

PLAIN = group_spec(template())
WORKED = group_spec(template(workflow="Say", num_samples=3))
STREAM = group_stream(PLAIN.group)


def requested(spec: GroupSpec) -> GroupsRequested:
    return GroupsRequested(
        owner="r1", purpose=Purpose.TRAIN, step=1, slots=slots(3), template=spec.template
    )


def finished(index: int) -> SampleFinished:
    effect = GenerateSample(spec=WORKED, index=index)
    return SampleFinished(effect, artifact=ref(f"part {index}"), entry=entry(index))


def sampled() -> GroupSampled:
    effect = GenerateGroup(spec=PLAIN)
    return GroupSampled(effect, artifact=ref("group"), entries=(entry(0), entry(1)))


GENERATED = GroupGenerated(spec=PLAIN, entries=(entry(0), entry(1)), parts=(ref("group"),))


def generated(index: int) -> SampleGenerated:
    return SampleGenerated(spec=WORKED, entry=entry(index), artifact=ref(f"part {index}"))


def test_a_group_without_workflow_is_one_effect() -> None:
    given(CONSUMER).when(requested(PLAIN)).then(effects=[GenerateGroup(spec=PLAIN)])


def test_a_group_without_user_code_is_one_effect() -> None:
    bare = group_spec(template(user_code=False))
    given(CONSUMER).when(requested(bare)).then(effects=[GenerateGroup(spec=bare)])


def test_a_group_with_a_workflow_is_an_effect_per_sample() -> None:
    wanted = [GenerateSample(spec=WORKED, index=index) for index in range(3)]
    given(CONSUMER).when(requested(WORKED)).then(effects=wanted)


def test_every_slot_is_decided_on_its_own_stream() -> None:
    request = requested(PLAIN).model_copy(update={"slots": slots(3, 5, 1)})
    when = given(CONSUMER).when(request)
    assert list(when.decisions) == [group_stream(f"r1-train-1-{slot}-0") for slot in range(3)]
    assert when.effects == [GenerateGroup(spec=spec) for spec in request.group_specs()]


def test_a_request_asks_only_for_what_is_missing() -> None:
    when = given(CONSUMER, generated(1)).when(requested(WORKED))
    when.then(effects=[GenerateSample(spec=WORKED, index=index) for index in (0, 2)])


def test_a_request_for_a_finished_group_decides_nothing() -> None:
    given(CONSUMER, GENERATED).when(requested(PLAIN)).then_nothing()


def test_a_sampled_group_is_recorded_once() -> None:
    given(CONSUMER).when(sampled(), stream=STREAM).then(events=[GENERATED])
    given(CONSUMER, GENERATED).when(sampled(), stream=STREAM).then_nothing()


def test_a_finished_sample_is_recorded_once() -> None:
    given(CONSUMER).when(finished(1), stream=STREAM).then(events=[generated(1)])
    given(CONSUMER, generated(1)).when(finished(1), stream=STREAM).then_nothing()


def test_the_last_sample_brings_its_group() -> None:
    when = given(CONSUMER, generated(2), generated(0)).when(finished(1), stream=STREAM)
    group = GroupGenerated(
        spec=WORKED,
        entries=(entry(0), entry(1), entry(2)),
        parts=(ref("part 0"), ref("part 1"), ref("part 2")),
    )
    when.then(events=[generated(1), group])
    when.after().when(finished(1), stream=STREAM).then_nothing()


def test_a_sample_whose_workers_died_is_a_failed_entry_without_artifact() -> None:
    failed = Failed(GenerateSample(spec=WORKED, index=1), FailureCategory.CRASH, "died 20 times")
    when = given(CONSUMER, generated(0), generated(2)).when(failed, stream=STREAM)
    lost = entry(1, prompt_tokens=0, failure="crash", message="died 20 times")
    when.then(
        events=[
            SampleGenerated(spec=WORKED, entry=lost, artifact=None),
            GroupGenerated(
                spec=WORKED,
                entries=(entry(0), lost, entry(2)),
                parts=(ref("part 0"), ref("part 2")),
            ),
        ]
    )
    when.after().when(failed, stream=STREAM).then_nothing()


def test_a_group_that_cannot_be_generated_has_only_failed_entries() -> None:
    failed = Failed(GenerateGroup(spec=PLAIN), FailureCategory.INTERNAL, "engine gone")
    lost = [
        entry(i, prompt_tokens=0, failure="internal_error", message="engine gone") for i in (0, 1)
    ]
    when = given(CONSUMER).when(failed, stream=STREAM)
    when.then(events=[GroupGenerated(spec=PLAIN, entries=tuple(lost), parts=())])
    given(CONSUMER, GENERATED).when(failed, stream=STREAM).then_nothing()


@pytest.mark.parametrize("num_samples", [8, 64, 128])
def test_messages_of_a_whole_failed_group_fit_into_its_event(num_samples: int) -> None:
    spec = group_spec(template(workflow="Say", num_samples=num_samples))
    world = given(CONSUMER)
    for index in range(num_samples):
        effect = GenerateSample(spec=spec, index=index)
        failed = Failed(effect, FailureCategory.AGENT, 'Traceback: "\\\x07' * 1000)
        world = world.when(failed, stream=STREAM).after()
    assert isinstance(world.events[-1], GroupGenerated)


@holds_for(st.lists(st.sampled_from([0, 1, 2]), max_size=12))
def test_any_order_and_any_number_of_outcomes_ends_in_the_same_group(order: list[int]) -> None:
    world: Given = given(CONSUMER)
    for index in [*order, 0, 1, 2]:
        outcome: Outcome = finished(index)
        world = world.when(outcome, stream=STREAM).after()
    groups: list[Event] = [e for e in world.events if isinstance(e, GroupGenerated)]
    assert len(groups) == 1
    assert len(world.events) == 4
    assert isinstance(groups[0], GroupGenerated)
    assert [part.sha256 for part in groups[0].parts] == [ref(f"part {i}").sha256 for i in range(3)]
