"""A run pauses before the step that would pass its budget, and goes on when the budget is raised."""

from typing import Any

import pytest

from consumers.run.spending import exhausted_message
from schemas.costs.budget import Budget
from schemas.costs.prices import Prices
from schemas.costs.work import Work
from schemas.events import (
    BudgetExhausted,
    CheckpointRequested,
    EvaluationRequested,
    EvaluationSettled,
    Event,
    GroupGraded,
    GroupsRequested,
    PolicyUpdated,
    RunPaused,
    RunRequested,
    RunResumed,
    RunResumeRequested,
    RunStopRequested,
    StepSettled,
)
from schemas.sampling import JudgeUsage
from schemas.specs import GroupSpec
from tests.unit.consumers.runs import Story, graded, only, requested, taught, updated, validated

HOUR = 3600.0
GROUP, STEP = {"cpu": HOUR}, Work(effect="TrainStep", device="cpu", device_s=HOUR, wasted_s=HOUR)
"""A step of two groups costs 4 hours of the CPU and 12 tokens: 3 of each of its samples."""


def limited(*, steps: int = 9, **limits: Any) -> RunRequested:
    request = requested(steps=steps, budget=limits, checkpoints={"checkpoint_save_freq": 100})
    return request.model_copy(update={"prices": Prices(cpu_hour=0.5)})


def spent(spec: GroupSpec, **changes: Any) -> GroupGraded:
    return graded(spec).model_copy(update={"spent": GROUP, **changes})


def trained(step: int, work: Work | None = STEP) -> PolicyUpdated:
    return updated(step).model_copy(update={"work": work})


def take_steps(story: Story, asked: GroupsRequested | None) -> list[Event]:
    """Take steps until the run requests no groups. Returns the last events."""
    while asked is not None:
        for spec in asked.group_specs():
            story.tell(spent(spec))
        said = story.tell(trained(asked.step))
        asked = next(iter(only(said, GroupsRequested)), None)
    return said.events


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        ({"max_hours": 12.0}, 3),
        ({"max_hours": 11.9}, 2),
        ({"max_hours": 15.9}, 3),
        ({"max_cost": 8.0}, 4),
        ({"max_tokens": 35}, 2),
        ({"max_tokens": 36}, 3),
        ({"max_tokens": 1}, 1),
        ({"max_hours": 100.0, "max_tokens": 24}, 2),
    ],
)
def test_a_run_pauses_before_the_step_that_would_pass_its_budget(
    limits: dict[str, Any], taken: int
) -> None:
    story = Story(limited(**limits))
    settled, exhausted, paused = take_steps(story, only(story.begin(), GroupsRequested)[0])
    assert isinstance(settled, StepSettled)
    assert isinstance(exhausted, BudgetExhausted)
    assert isinstance(paused, RunPaused)
    assert (settled.step, exhausted.step, paused.step) == (taken, taken, taken)
    assert exhausted.used <= max(exhausted.most, exhausted.estimate), "at most one step too many"
    assert exhausted.used + exhausted.estimate > exhausted.most
    assert paused.reason == exhausted_message(exhausted)
    assert f"--raise {exhausted.limit}=" in paused.reason


def test_twin_a_run_without_a_budget_takes_all_its_steps() -> None:
    story = Story(limited(steps=3))
    take_steps(story, only(story.begin(), GroupsRequested)[0])
    assert not [event for event in story.told if isinstance(event, BudgetExhausted | RunPaused)]
    assert [event.step for event in story.told if isinstance(event, StepSettled)] == [0, 1, 2, 3]


def test_a_raised_budget_goes_on_and_ends_with_the_new_limit() -> None:
    story = Story(limited(max_hours=8.0))
    take_steps(story, only(story.begin(), GroupsRequested)[0])
    raised = RunResumeRequested(run="r1", budget=Budget(max_hours=16.0))
    said = story.tell(raised).then_types(RunResumed, GroupsRequested)
    *_, exhausted, _paused = take_steps(story, only(said, GroupsRequested)[0])
    assert isinstance(exhausted, BudgetExhausted)
    assert (exhausted.step, exhausted.most, exhausted.used) == (4, 16.0, 16.0)


def test_a_resume_without_a_raise_pauses_again_with_the_same_reason() -> None:
    story = Story(limited(max_hours=8.0))
    take_steps(story, only(story.begin(), GroupsRequested)[0])
    said = story.tell(RunResumeRequested(run="r1"))
    said.then_types(RunResumed, BudgetExhausted, RunPaused)


def test_the_estimate_is_the_most_expensive_of_the_last_steps() -> None:
    story = Story(limited(max_hours=17.0))
    [asked] = only(story.begin(), GroupsRequested)
    for spec in asked.group_specs():
        story.tell(spent(spec, spent={"cpu": 3 * HOUR}))
    [following] = only(story.tell(trained(1)), GroupsRequested)
    for spec in following.group_specs():
        story.tell(spent(spec))
    said = story.tell(trained(2))
    [exhausted] = only(said, BudgetExhausted)
    assert (exhausted.step, exhausted.used, exhausted.estimate) == (2, 12.0, 8.0)


def test_judges_and_tokens_without_a_price_count_as_money() -> None:
    request = limited(max_cost=2.0)
    story = Story(request.model_copy(update={"prices": Prices(cpu_hour=0.0, call_tokens=1.0)}))
    [asked] = only(story.begin(), GroupsRequested)
    named, unpriced = asked.group_specs()
    story.tell(spent(named, judged=JudgeUsage(calls=1, tokens=9, usd=0.75)))
    story.tell(spent(unpriced, judged=JudgeUsage(calls=1, tokens=500_000)))
    [exhausted] = only(story.tell(trained(1)), BudgetExhausted)
    assert (exhausted.limit, exhausted.used) == ("max_cost", 1.25)


def test_a_run_that_samples_nothing_counts_the_tokens_of_its_rows() -> None:
    request = taught(steps=5)
    config = request.config.model_copy(update={"budget": Budget(max_tokens=25)})
    story = Story(request.model_copy(update={"config": config}))
    story.begin()
    for step in (1, 2):
        tokens = {"metrics": {"train/tokens": 10.0}}
        said = story.tell(updated(step).model_copy(update=tokens))
    assert [event.step for event in only(said, BudgetExhausted)] == [2]


def test_validations_count_beside_the_steps_and_the_first_is_waited_for() -> None:
    request = limited(max_tokens=60)
    config = request.config.model_copy(
        update={"checkpoints": requested(validate=True).config.checkpoints}
    )
    story = Story(request.model_copy(update={"config": config, "validation": request.dataset}))
    [validation] = only(story.begin(), EvaluationRequested)
    cost = {"metrics": {"eval/tokens": 20.0}}
    said = story.tell(validated(validation).model_copy(update=cost))
    said.then_types(EvaluationSettled, GroupsRequested)
    for spec in only(said, GroupsRequested)[0].group_specs():
        story.tell(spent(spec))
    [exhausted] = only(story.tell(trained(1)), BudgetExhausted)
    assert (exhausted.used, exhausted.estimate) == (32.0, 32.0)


def test_an_exhausted_run_can_be_stopped() -> None:
    story = Story(limited(max_hours=8.0))
    take_steps(story, only(story.begin(), GroupsRequested)[0])
    story.tell(RunStopRequested(run="r1")).then_types(CheckpointRequested, RunResumed)


def test_the_last_step_needs_no_budget_for_another_one() -> None:
    story = Story(limited(steps=2, max_hours=8.0))
    take_steps(story, only(story.begin(), GroupsRequested)[0])
    assert not [event for event in story.told if isinstance(event, BudgetExhausted)]
