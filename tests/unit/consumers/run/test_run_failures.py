"""A grader that raises makes a failed sample, and a run that could train nothing has not
finished."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from consumers.run import settle as run_batch
from consumers.run import state as run_state
from consumers.run.consumer import CONSUMER
from consumers.run.health import MOST_LOST
from consumers.run.settle import metrics, settle
from schemas.events import (
    BatchAssembled,
    CheckpointRequested,
    CheckpointSettled,
    EvaluationRequested,
    Event,
    GroupsRequested,
    GroupsSettled,
    RunFailed,
    RunFinished,
    RunWarned,
    StepSettled,
    StepSkipped,
)
from schemas.ids import run_stream
from tests.unit.consumers.runs import Story, graded, requested, saved, validated

E = TypeVar("E", bound=Event)
RAISED = "rollouts/say/main.py:17 in grade: ZeroDivisionError: division by zero"


class Told(Story):
    """Answers a run group by group."""

    def __init__(self, *, steps: int = 3, validate: bool = False, **advanced: Any) -> None:
        super().__init__(requested(steps=steps, validate=validate, advanced=advanced))
        said = self.begin()
        for asked in only(said.events, EvaluationRequested):
            self.tell(validated(asked))
        self.asked = only(self.told, GroupsRequested)

    def grade(self, *groups: tuple[float | None, ...], backwards: bool = False) -> list[Event]:
        """Grade the groups of the next step with these rewards; where a reward is missing, the
        grader raised. Validations and checkpoints succeed. Returns all events that follow."""
        known = len(self.told)
        specs = list(zip(self.asked.pop(0).group_specs(), groups, strict=True))
        for spec, rewards in reversed(specs) if backwards else specs:
            slot = spec.group_key.slot
            said = self.tell(graded(spec, *rewards, grader=f"{RAISED} on {slot}"))
        self.asked += only(said.events, GroupsRequested)
        for asked in only(said.events, EvaluationRequested):
            self.tell(validated(asked))
        for due in only(said.events, CheckpointRequested):
            self.tell(saved(due))
        return self.told[known:]


def only(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


NONE = (None, None)


def test_a_grader_that_raises_is_a_failed_sample() -> None:
    story = Told()
    batch = only_batch(story)
    assert batch.metrics["rollout/failed_ratio"] == 0.5
    assert batch.metrics["failed/grader_error"] == 0.5
    assert batch.metrics["rollout/response_lengths"] == 3.0, "all four were generated"


def only_batch(story: Told) -> BatchAssembled:
    (request,) = story.asked
    one, two = request.group_specs()
    story.tell(graded(one, None, None, grader=RAISED))
    (batch,) = only(story.tell(graded(two)).events, BatchAssembled)
    return batch


def test_a_sample_counts_once_whatever_fails_about_it() -> None:
    (request,) = Told().asked
    spec, _ = request.group_specs()
    both = graded(spec, None, 1.0, failure="agent_error", message="no luck", grader=RAISED)
    assert metrics([settle(both)], newest=0)["rollout/failed_ratio"] == 1.0


@pytest.mark.parametrize("mode", ["sync", "one_step_off_async", "fully_async"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_step_whose_every_grade_failed_ends_the_run_and_quotes_the_lowest_slot(
    mode: str, backwards: bool
) -> None:
    said = Told(execution_mode=mode).grade(NONE, NONE, backwards=backwards)
    (failed,) = only(said, RunFailed)
    assert f"grader_error: {RAISED} on 0" in failed.message
    assert "submit the run again" in failed.message
    assert not only(said, GroupsRequested)


def test_steps_ahead_that_fail_wait_for_the_steps_before_them() -> None:
    story = Told(steps=4, execution_mode="one_step_off_async")
    ahead = story.asked.pop(1)
    for spec in ahead.group_specs():
        story.tell(graded(spec, *NONE, grader=RAISED)).then_types(GroupsSettled)
    (batch,) = only(story.grade((0.0, 1.0), (0.0, 1.0)), BatchAssembled)
    assert batch.step == 1, "the step before is trained, whatever is known of the next"


def test_the_twin_group_of_flat_rewards_is_not_a_failed_one() -> None:
    """With equal rewards nothing can be learned either, but nothing failed, so the run finishes."""
    story = Told(steps=1, filter_groups=True, max_replacements=0)
    said = story.grade((1.0, 1.0), (1.0, 1.0))
    assert only(said, StepSkipped)
    assert only(said, RunFinished)


@pytest.mark.parametrize("validate", [False, True])
def test_a_run_that_trained_nothing_because_of_errors_has_failed(validate: bool) -> None:
    story = Told(steps=2, validate=validate)
    assert not only(story.grade(NONE, (None, 1.0)), RunFailed)
    ended = story.grade((None, 0.5), NONE)
    (failed,) = only(ended, RunFailed)
    assert "no step of this run was trained" in failed.message
    assert f"in step 1: grader_error: {RAISED} on 0" in failed.message


def test_one_trained_step_is_a_finished_run() -> None:
    story = Told(steps=2)
    story.grade(NONE, (None, 1.0))
    (request,) = story.asked
    story.step(request)
    due = only(story.told, CheckpointRequested)
    story.tell(saved(due[-1])).then_types(CheckpointSettled, RunFinished)


def test_lost_steps_in_a_row_end_the_run() -> None:
    story = Told(steps=20)
    for _ in range(MOST_LOST - 1):
        said = story.grade(NONE, (None, 1.0))
        assert only(said, StepSkipped)
        assert not only(said, RunFailed)
    said = story.grade(NONE, (None, 1.0))
    (failed,) = only(said, RunFailed)
    assert f"{MOST_LOST} steps in a row" in failed.message
    assert "in step 1: " in failed.message


def test_a_step_that_trains_begins_the_count_again() -> None:
    story = Told(steps=20)
    for _ in range(MOST_LOST - 1):
        story.grade(NONE, (None, 1.0))
    request = story.asked.pop(0)
    story.asked += only(story.step(request).events, GroupsRequested)
    for due in only(story.told, CheckpointRequested):
        story.tell(saved(due))
    state = story.world.state(run_stream("r1"))
    assert (state.lost, state.trained) == (0, True)
    assert not only(story.grade(NONE, (None, 1.0)), RunFailed)


def test_skipped_steps_are_settled_ones() -> None:
    said = Told().grade(NONE, (None, 1.0))
    kinds = [type(event) for event in said]
    assert kinds == [
        GroupsSettled,
        GroupsSettled,
        RunWarned,
        StepSkipped,
        StepSettled,
        GroupsRequested,
    ]
    assert CONSUMER.fold_version >= 8, "the state has the count of lost steps"


def test_twin_without_the_count_of_ungraded_samples_a_run_finishes_untrained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_batch, "_count_ungraded", lambda graded: {})
    monkeypatch.setattr(run_state, "is_lost", lambda group: False)
    story = Told(steps=2)
    story.grade(NONE, NONE)
    assert only(story.grade(NONE, NONE), RunFinished)
    assert not only(story.told, BatchAssembled), "and no message says that nothing was trained"
