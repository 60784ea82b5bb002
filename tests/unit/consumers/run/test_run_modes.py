"""Sampling runs ahead of learning, and the version that each group samples with never depends on
timing."""

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.run.consumer import CONSUMER
from infra.spine.runtime.consumer import Meta
from schemas.events import (
    BatchAssembled,
    CheckpointRequested,
    EvaluationRequested,
    Event,
    GroupsRequested,
    GroupsSettled,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunResumed,
    RunResumeRequested,
    RunStopped,
    RunStopRequested,
    StepSettled,
    StepSkipped,
)
from schemas.specs import GroupSpec
from tests.kit.decider import NOW
from tests.kit.property_examples import examples
from tests.kit.specs import version
from tests.unit.consumers.runs import (
    STREAM,
    Story,
    graded,
    only,
    requested,
    saved,
    updated,
    validated,
)
from trainer.schedule import Pace

ONE_OFF: dict[str, Any] = {"execution_mode": "one_step_off_async"}
FULLY: dict[str, Any] = {"execution_mode": "fully_async", "max_steps_off_policy": 2}
PACES = st.one_of(
    st.builds(Pace, st.just(0), st.integers(1, 3)),
    st.builds(Pace, st.integers(1, 4), st.integers(1, 3)),
)


def said(pace: Pace) -> dict[str, Any]:
    """The TOML keys that ask for this pace."""
    if pace.depth == 0:
        return {"weight_sync_interval": pace.interval}
    return {
        "execution_mode": "fully_async",
        "max_steps_off_policy": pace.depth,
        "weight_sync_interval": pace.interval,
    }


def begun(*, steps: int = 5, **advanced: Any) -> tuple[Story, list[GroupsRequested]]:
    story = Story(requested(steps=steps, advanced=advanced))
    return story, only(story.begin(), GroupsRequested)


def test_one_step_off_asks_for_the_next_step_while_this_one_trains() -> None:
    story, (first, second) = begun(**ONE_OFF)
    assert [(r.step, r.template.policy.version) for r in (first, second)] == [(1, 0), (2, 0)]
    for spec in second.group_specs():
        story.tell(graded(spec)).then_types(GroupsSettled)
    one, two = first.group_specs()
    story.tell(graded(two))
    story.tell(graded(one)).then_types(GroupsSettled, BatchAssembled)
    _, batch, third = (
        story.tell(updated(1)).then_types(StepSettled, BatchAssembled, GroupsRequested).events
    )
    assert isinstance(batch, BatchAssembled)
    assert batch.step == 2, "it was whole already"
    assert batch.metrics["train/lag"] == 1
    assert isinstance(third, GroupsRequested)
    assert third.step == 3
    assert third.template.policy.version == 1
    assert third.template.policy.weights == version(1).weights


def test_fully_async_with_an_interval_samples_with_an_older_version_again() -> None:
    story, requests = begun(**FULLY, weight_sync_interval=2, steps=7)
    while requests:
        requests = [
            r for r in requests for said in (story.step(r),) for r in only(said, GroupsRequested)
        ]
    pinned = [e.template.policy for e in story.told if isinstance(e, GroupsRequested)]
    assert [policy.version for policy in pinned] == [0, 0, 0, 0, 2, 2, 4]
    assert [policy.weights for policy in pinned] == [version(p.version).weights for p in pinned]


@examples(60)
@given(PACES, st.integers(1, 8), st.integers(0, 2**32), st.booleans())
def test_every_group_is_trained_once_within_the_bound_in_any_order(
    pace: Pace, steps: int, seed: int, replaces: bool
) -> None:
    """Groups are graded, steps taken, checkpoints saved and the run paused in any order."""
    draw = random.Random(seed)
    more = {"algorithm": "dapo", "max_replacements": 1} if replaces else {}
    story = Story(requested(steps=steps, advanced={**said(pace), **more}))
    todo: list[Any] = _answers(story.begin().events)
    paused = False
    while todo or paused:
        if paused or draw.random() < 0.15:
            ask = RunResumeRequested if paused else RunPauseRequested
            events = story.tell(ask(run="r1")).events
        else:
            message = todo.pop(draw.randrange(len(todo)))
            events = story.tell(_flat_or_not(message)).events
        todo += _answers(events)
        paused = next(
            (
                isinstance(e, RunPaused)
                for e in reversed(events)
                if isinstance(e, RunPaused | RunResumed)
            ),
            paused,
        )
    assert isinstance(story.told[-1], RunFinished), "it comes to its end"
    _trained_once(story, pace, steps)


def _answers(events: Sequence[Event]) -> list[Any]:
    """The replies of the other consumers to these requests."""
    found: list[Any] = []
    for event in events:
        match event:
            case GroupsRequested():
                found += event.group_specs()
            case BatchAssembled():
                found.append(updated(event.step))
            case CheckpointRequested():
                found.append(saved(event))
            case EvaluationRequested():
                found.append(validated(event))
    return found


def _flat_or_not(message: Any) -> Any:
    """The grade of a group is a function of its place alone, as every recorded fact is."""
    if not isinstance(message, GroupSpec):
        return message
    flat = random.Random(message.group).random() < 0.3
    return graded(message, *((1.0, 1.0) if flat else (0.0, 1.0)))


def _trained_once(story: Story, pace: Pace, steps: int) -> None:
    asked = {
        (request.step, slot.slot, slot.replacement): request.template.policy.version
        for request in story.told
        if isinstance(request, GroupsRequested)
        for slot in request.slots
    }
    settled = [
        (event.step, group.group.slot, group.group.replacement, group.dropped)
        for event in story.told
        if isinstance(event, GroupsSettled)
        for group in event.groups
    ]
    assert sorted(place[:3] for place in settled) == sorted(asked), "each is settled once"
    kept = sorted(place[:3] for place in settled if place[3] is None)
    batches = [event for event in story.told if isinstance(event, BatchAssembled)]
    trained = sorted((b.step, g.slot, g.replacement) for b in batches for g in b.groups)
    assert trained == kept, "only what teaches nothing is left out, and never for being late"
    skipped = [event.step for event in story.told if isinstance(event, StepSkipped)]
    assert sorted([*(batch.step for batch in batches), *skipped]) == list(range(1, steps + 1))
    for (step, _, _), policy in asked.items():
        assert policy == pace.pinned_version(step)
        assert 0 <= step - 1 - policy <= pace.most_lag
    for batch in batches:
        assert batch.metrics["train/lag"] <= pace.most_lag


def test_a_pause_keeps_what_is_sampled_ahead_and_resume_trains_it() -> None:
    story, (first, second, third) = begun(**FULLY)
    story.tell(RunPauseRequested(run="r1")).then_types(RunPaused)
    for spec in (*first.group_specs(), *second.group_specs()):
        story.tell(graded(spec)).then_types(GroupsSettled)
    story.tell(RunResumeRequested(run="r1")).then_types(RunResumed, BatchAssembled)
    story.tell(RunPauseRequested(run="r1")).then_nothing()
    story.tell(updated(1)).then_types(StepSettled, RunPaused)
    for spec in third.group_specs():
        story.tell(graded(spec)).then_types(GroupsSettled)
    resumed = story.tell(RunResumeRequested(run="r1"))
    resumed.then_types(RunResumed, BatchAssembled, GroupsRequested)


def test_a_stop_does_not_wait_for_what_is_sampled_ahead() -> None:
    story, (first, second, _) = begun(**FULLY, steps=9)
    for spec in second.group_specs():
        story.tell(graded(spec))
    for spec in first.group_specs():
        story.tell(graded(spec))
    story.tell(RunStopRequested(run="r1")).then_nothing()
    checkpoint = story.tell(updated(1)).then_types(StepSettled, CheckpointRequested).events[1]
    assert isinstance(checkpoint, CheckpointRequested)
    assert checkpoint.spec.step == 1
    assert only(story.tell(saved(checkpoint)), RunStopped)


def test_a_stop_takes_the_step_at_hand_when_the_last_version_is_not_durable() -> None:
    story, (first, second, third) = begun(**FULLY, steps=9)
    story.step(first, durable=False)
    story.tell(RunStopRequested(run="r1")).then_nothing()
    for spec in second.group_specs():
        events = story.tell(graded(spec)).events
    assert isinstance(events[-1], BatchAssembled)
    assert events[-1].durable
    assert not any(isinstance(event, GroupsRequested) for event in events)
    for spec in third.group_specs():
        story.tell(graded(spec)).then_types(GroupsSettled)
    story.tell(updated(2)).then_types(StepSettled, CheckpointRequested)


@pytest.mark.parametrize(("mode", "waited"), [("sync", 2.0), ("fully_async", 7.0)])
def test_sampling_that_ran_ahead_is_no_part_of_the_time_between_steps(
    mode: str, waited: float
) -> None:
    story, (first, *_) = begun(execution_mode=mode)
    for spec in first.group_specs():
        story.tell(graded(spec).model_copy(update={"generate_s": 5.0}))
    learned = updated(1).model_copy(
        update={"metrics": {"time/learn_s": 2.0, "time/publish_s": 1.0}}
    )
    later = Meta(UUID(int=1), STREAM, UUID(int=1), NOW + timedelta(seconds=10))
    settled = CONSUMER.handle(story.world.state(STREAM), learned, later).events[0]
    assert isinstance(settled, StepSettled)
    assert settled.metrics["time/wait_s"] == waited
