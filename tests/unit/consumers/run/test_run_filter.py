"""The run consumer replaces groups that teach nothing (DAPO), each slot as often as the run
allows."""

from collections.abc import Sequence
from typing import Any

import pytest

from consumers.run.settle import FLAT
from schemas.events import (
    BatchAssembled,
    Event,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    RunStopRequested,
    StepSettled,
    StepSkipped,
)
from schemas.specs import GroupSpec
from tests.unit.consumers.runs import Story, graded, initialized, only, requested, synced


def begun(**advanced: Any) -> tuple[Story, GroupsRequested]:
    story = Story(requested(advanced={"algorithm": "dapo", **advanced}))
    story.tell(synced(rewards=[part["name"] for part in advanced.get("rewards", ())]))
    (_, first) = story.tell(initialized()).events
    assert isinstance(first, GroupsRequested)
    return story, first


def asked(events: Sequence[Event]) -> GroupSpec:
    (request,) = (event for event in events if isinstance(event, GroupsRequested))
    (spec,) = request.group_specs()
    return spec


def test_a_flat_group_is_replaced_by_another_row_at_the_same_version() -> None:
    story, first = begun()
    one, two = first.group_specs()
    said = story.tell(graded(one, 1.0, 1.0)).then_types(GroupsSettled, GroupsRequested)
    settled, request = said.events
    assert isinstance(settled, GroupsSettled)
    assert settled.groups[0].dropped == FLAT
    assert isinstance(request, GroupsRequested)
    again = asked(said.events)
    assert (request.step, request.template) == (first.step, first.template)
    assert again.group_key.slot == one.group_key.slot
    assert again.group_key.replacement == 1
    assert again.row != one.row
    story.tell(graded(two)).then_types(GroupsSettled)
    _, batch = story.tell(graded(again)).then_types(GroupsSettled, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert [(group.slot, group.replacement) for group in batch.groups] == [(0, 1), (1, 0)]
    assert batch.metrics["rollout/raw_reward"] == pytest.approx((1 + 1 + 0 + 1 + 0 + 1) / 6)
    assert batch.metrics["rollout/dropped_groups"] == 1
    assert batch.metrics["rollout/zero_variance_ratio"] == pytest.approx(1 / 3)


def test_a_replacement_does_not_depend_on_who_was_dropped_first() -> None:
    rows = []
    for order in ((0, 1), (1, 0)):
        story, first = begun()
        specs = first.group_specs()
        found = {}
        for slot in order:
            again = asked(story.tell(graded(specs[slot], 0.0, 0.0)).events)
            found[slot] = again.row
        rows.append([found[0], found[1]])
    assert rows[0] == rows[1]


def test_the_slot_s_earlier_group_is_not_heard_again() -> None:
    story, first = begun()
    one, _ = first.group_specs()
    story.tell(graded(one, 1.0, 1.0))
    story.tell(graded(one, 0.0, 1.0)).then_nothing()


def test_after_the_last_replacement_the_slot_stays_empty() -> None:
    story, first = begun(max_replacements=2)
    one, two = first.group_specs()
    story.tell(graded(two))
    spec = one
    for _ in range(2):
        spec = asked(story.tell(graded(spec, 0.0, 0.0)).events)
    _, batch = story.tell(graded(spec, 0.0, 0.0)).then_types(GroupsSettled, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert [group.slot for group in batch.groups] == [1]
    assert batch.metrics["rollout/dropped_groups"] == 3


def test_a_step_whose_groups_all_stay_flat_is_skipped_with_that_reason() -> None:
    story, first = begun(max_replacements=0)
    one, two = first.group_specs()
    story.tell(graded(one, 0.0, 0.0)).then_types(GroupsSettled)
    said = story.tell(graded(two, 1.0, 1.0))
    said.then_types(GroupsSettled, StepSkipped, StepSettled, GroupsRequested)
    (skipped,) = only(said, StepSkipped)
    assert skipped.reason == FLAT


def test_a_failed_group_is_dropped_and_not_replaced() -> None:
    story, first = begun()
    one, _ = first.group_specs()
    (settled,) = story.tell(graded(one, None, 1.0)).then_types(GroupsSettled).events
    assert isinstance(settled, GroupsSettled)
    assert settled.groups[0].dropped != FLAT


def test_a_stop_does_not_wait_for_replacements() -> None:
    story, first = begun()
    second = only(story.step(first, durable=False), GroupsRequested)[0]
    one, _ = second.group_specs()
    story.tell(RunStopRequested(run="r1")).then_nothing()
    story.tell(graded(one, 1.0, 1.0)).then_types(GroupsSettled)


@pytest.mark.parametrize("advanced", [{"algorithm": "grpo"}, {"filter_groups": False}])
def test_without_the_filter_flat_groups_train(advanced: dict[str, Any]) -> None:
    story, first = begun(**advanced)
    one, two = first.group_specs()
    story.tell(graded(one, 1.0, 1.0)).then_types(GroupsSettled)
    _, batch = story.tell(graded(two)).events
    assert isinstance(batch, BatchAssembled)
    assert [group.slot for group in batch.groups] == [0, 1]


def test_any_group_relative_objective_may_filter() -> None:
    story, first = begun(algorithm="grpo", filter_groups=True)
    one, _ = first.group_specs()
    story.tell(graded(one, 1.0, 1.0)).then_types(GroupsSettled, GroupsRequested)


PARTS = ({"name": "right", "weight": 1.0}, {"name": "short", "weight": 0.5})


def with_parts(spec: GroupSpec, *parts: dict[str, float]) -> GroupGraded:
    """A group whose samples all have reward 1, with these parts."""
    alike = graded(spec, *(1.0 for _ in parts))
    grades = tuple(
        grade.model_copy(update={"parts": own})
        for grade, own in zip(alike.grades, parts, strict=True)
    )
    return alike.model_copy(update={"grades": grades})


def test_gdpo_gets_the_parts_of_rewards_and_compares_them() -> None:
    """Rewards that are equal teach something if their parts are not."""
    story, first = begun(algorithm="gdpo", filter_groups=True, rewards=PARTS)
    one, two = first.group_specs()
    alike = {"right": 0.5, "short": 1.0}
    flat = story.tell(with_parts(one, alike, alike))
    assert only(flat, GroupsSettled)[0].groups[0].dropped == FLAT
    story.tell(with_parts(asked(flat.events), alike, {"right": 1.0, "short": 0.0}))
    _, batch = story.tell(with_parts(two, {"right": 0.0, "short": 2.0, "other": 9.0}, alike)).events
    assert isinstance(batch, BatchAssembled)
    parts = [group.parts for group in batch.groups]
    assert parts[0] == {"right": (0.5, 1.0), "short": (1.0, 0.0)}
    assert parts[1] == {"right": (0.0, 0.5), "short": (2.0, 1.0)}, "a part that is not compared"


def test_a_sample_that_lacks_a_part_has_no_reward_in_gdpo() -> None:
    story, first = begun(algorithm="gdpo", filter_groups=False, rewards=PARTS)
    one, _ = first.group_specs()
    whole = {"right": 0.5, "short": 1.0}
    said = story.tell(with_parts(one, whole, {"right": 9.0}, {**whole, "right": 0.0}))
    group = only(said, GroupsSettled)[0].groups[0]
    assert group.dropped is None
    assert group.group.rewards == (1.0, None, 1.0)
    assert group.group.parts == {"right": (0.5, None, 0.0), "short": (1.0, None, 1.0)}


def test_a_batch_of_other_algorithms_has_no_parts() -> None:
    story, first = begun(algorithm="grpo", rewards=PARTS)
    for spec in first.group_specs():
        said = story.tell(with_parts(spec, {"right": 0.5, "short": 1.0}, {"right": 0.5}))
    assert isinstance(said.events[-1], BatchAssembled)
    assert "parts" not in said.events[-1].groups[0].model_dump()
