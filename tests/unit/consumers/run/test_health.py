"""The run consumer detects steps whose numbers are not finite, and rewards that carry no
information."""

from typing import Any
from uuid import UUID

import pytest

from consumers.run.health import FLAT_STEPS, MOST_UNHEALTHY, frequent_failure, is_flat
from consumers.run.settle import settle
from infra.spine.runtime.consumer import Incoming
from schemas.events import (
    BatchAssembled,
    CheckpointRequested,
    GroupsRequested,
    GroupsSettled,
    RunFailed,
    RunWarned,
    StepSettled,
    StepSkipped,
)
from tests.kit.decider import When
from tests.unit.consumers.runs import (
    Story,
    graded,
    initialized,
    only,
    requested,
    saved,
    taught,
    updated,
)


class Played(Story):
    """Answers a run step by step."""

    def __init__(self, *, steps: int, **advanced: Any) -> None:
        super().__init__(requested(steps=steps, advanced=advanced))
        self.asked: list[GroupsRequested] = only(self.begin(), GroupsRequested)

    def play(
        self,
        *rewards: float,
        healthy: bool = True,
        fork: str | None = None,
        truncated: bool = False,
    ) -> When:
        """Play the next step with these rewards in each group; every checkpoint is saved."""
        request = self.asked.pop(0)
        for spec in request.group_specs():
            said = self.tell(graded(spec, *rewards, truncated=truncated))
        if only(said, BatchAssembled):
            said = self.tell(trained(request.step, healthy=healthy, fork=fork))
        self.asked += only(said, GroupsRequested)
        for due in only(said, CheckpointRequested):
            self.tell(saved(due))
        return said


def trained(step: int, *, healthy: bool, fork: str | None = None) -> Incoming:
    done = updated(step)
    metrics = {**done.metrics, "train/skipped": 1.0 - healthy}
    return done.model_copy(update={"metrics": metrics, "fork": fork})


def test_a_step_whose_gradients_are_not_finite_is_skipped_and_names_its_batch() -> None:
    said = Played(steps=6).play(healthy=False)
    said.then_types(StepSkipped, StepSettled, GroupsRequested)
    skipped, settled, _ = said.events
    assert isinstance(skipped, StepSkipped)
    assert isinstance(settled, StepSettled)
    assert skipped.batch == settled.batch == UUID(int=1)
    assert "step 1 are not finite" in skipped.reason
    assert not settled.skipped, "the learner counted it: replaying the log must count it too"


def test_three_in_a_row_end_the_run_and_name_its_last_good_checkpoint() -> None:
    story = Played(steps=9)
    story.play()
    story.play()
    for _ in range(MOST_UNHEALTHY - 1):
        assert not only(story.play(healthy=False), RunFailed)
    failed = story.play(healthy=False).then_types(StepSkipped, StepSettled, RunFailed).events[2]
    assert isinstance(failed, RunFailed)
    assert "3 steps in a row (3 to 5)" in failed.message
    assert "last good checkpoint: r1@4" in failed.message
    story.tell(updated(6)).then_nothing()


def test_without_a_checkpoint_it_says_so() -> None:
    story = Played(steps=9)
    story.play(healthy=False)
    (due,) = only(story.play(healthy=False), CheckpointRequested) or (None,)
    failed = only(story.play(healthy=False), RunFailed)[0]
    expected = "none" if due is None else f"r1@{due.spec.step}"
    assert f"last good checkpoint: {expected}" in failed.message


def test_a_healthy_step_in_between_begins_the_count_anew() -> None:
    story = Played(steps=12)
    for healthy in (False, False, True, False, False, True):
        assert not only(story.play(healthy=healthy), RunFailed)


def test_sft_fails_the_same_way() -> None:
    story = Story(taught(steps=9))
    story.tell(taught(steps=9))
    story.tell(initialized())
    for step in range(1, MOST_UNHEALTHY + 1):
        said = story.tell(trained(step, healthy=False))
    assert only(said, RunFailed)


def test_rewards_that_say_nothing_for_a_while_warn_once() -> None:
    story = Played(steps=3 * FLAT_STEPS)
    warned = [only(story.play(1.0, 1.0), RunWarned) for _ in range(FLAT_STEPS + 2)]
    assert [len(found) for found in warned] == [0] * (FLAT_STEPS - 1) + [1, 0, 0]
    warning = warned[FLAT_STEPS - 1][0]
    assert warning.step == FLAT_STEPS
    assert f"up to step {FLAT_STEPS}" in warning.message
    story.play(0.0, 1.0)
    again = [only(story.play(0.5, 0.5), RunWarned) for _ in range(FLAT_STEPS)]
    assert [len(found) for found in again] == [0] * (FLAT_STEPS - 1) + [1]


def test_a_run_whose_answers_are_all_cut_off_and_left_out_says_so() -> None:
    """It ended as finished, without a word."""
    story = Played(steps=3, mask_truncated=True)
    *before, last = (only(story.play(0.0, 1.0, truncated=True), RunWarned) for _ in range(3))
    assert before == [[], []]
    assert "all answers were cut off in the 3 steps up to step 3" in last[0].message
    assert "Raise training.max_response_length" in last[0].message


@pytest.mark.parametrize(("mask", "truncated"), [(True, False), (False, True), (None, True)])
def test_answers_that_are_trained_on_are_no_reason_to_warn(
    mask: bool | None, *, truncated: bool
) -> None:
    story = Played(steps=3, mask_truncated=mask)
    assert not [only(story.play(0.0, 1.0, truncated=truncated), RunWarned) for _ in range(3)][-1]


def test_equal_rewards_and_cut_answers_in_turn_are_told_as_equal_rewards() -> None:
    story = Played(steps=2, mask_truncated=True)
    story.play(1.0, 1.0)
    [warned] = only(story.play(0.0, 1.0, truncated=True), RunWarned)
    assert "were equal in the 2 steps" in warned.message


def test_a_fork_at_that_step_has_a_warning_of_its_own() -> None:
    story = Played(steps=3 * FLAT_STEPS)
    for _ in range(FLAT_STEPS - 1):
        story.play(1.0, 1.0)
    fork, flat = only(story.play(1.0, 1.0, fork="step 2 gave other weights"), RunWarned)
    assert f"from step {FLAT_STEPS} on, the bits diverge from the log" in fork.message
    assert f"up to step {FLAT_STEPS}" in flat.message
    assert fork.name != flat.name, "both are events of one decision"


@pytest.mark.parametrize("steps", [1, 3, FLAT_STEPS, FLAT_STEPS + 2])
def test_a_run_in_which_no_step_taught_anything_ends_with_a_warning(steps: int) -> None:
    story = Played(steps=steps)
    warned = [only(story.play(1.0, 1.0), RunWarned) for _ in range(steps)]
    (last,) = warned[-1]
    assert f"step {steps}, so nothing is learned" in last.message
    assert sum(map(len, warned)) == (2 if steps > FLAT_STEPS else 1)


def test_a_run_with_one_step_that_taught_something_ends_without_one() -> None:
    story = Played(steps=3)
    said = [story.play(*rewards) for rewards in ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0))]
    assert not any(only(one, RunWarned) for one in said)


def test_one_group_with_spread_is_enough() -> None:
    story = Played(steps=2 * FLAT_STEPS)
    for step in range(FLAT_STEPS + 1):
        request = story.asked.pop(0)
        one, two = request.group_specs()
        story.tell(graded(one, 1.0, 1.0))
        story.tell(graded(two, 0.0, 1.0))
        said = story.tell(trained(request.step, healthy=True))
        story.asked += only(said, GroupsRequested)
        assert not only(said, RunWarned), step


def test_steps_that_filtered_all_their_groups_count_too() -> None:
    story = Played(steps=2 * FLAT_STEPS, algorithm="dapo", max_replacements=0)
    warned = [len(only(story.play(1.0, 1.0), RunWarned)) for _ in range(FLAT_STEPS)]
    assert warned == [0] * (FLAT_STEPS - 1) + [1]


@pytest.mark.parametrize(
    ("algorithm", "group_baseline", "expected"),
    [
        ("grpo", None, [True, False, True]),
        ("ppo", None, [False, False, True]),
        ("reinforce_plus_plus", None, [False, False, True]),
        ("reinforce_plus_plus", True, [True, False, True]),
    ],
)
def test_flat_rewards_depend_on_the_baseline(
    algorithm: str, group_baseline: bool | None, expected: list[bool]
) -> None:
    """The cases: every group is flat but the groups differ; one group has a spread; all rewards are
    the same."""
    advanced = requested(advanced={"algorithm": algorithm}).config.advanced
    advanced = advanced.model_copy(update={"group_baseline": group_baseline})
    figures = [(1.0, 0.5), (0.5, 0.4), (1.0, 0.0)]
    found = [
        is_flat({"rollout/zero_variance_ratio": flat, "rollout/reward_std": std}, advanced)
        for flat, std in figures
    ]
    assert found == expected
    assert not is_flat({}, advanced)


def test_frequent_failures_are_told_once_with_what_to_do() -> None:
    """Twins: a fifth is not frequent, and each category is told once."""
    where = "main.py:30 in run: ZeroDivisionError: division by zero"
    story = Story(requested(steps=5))
    asked = only(story.begin(), GroupsRequested)[0]
    one, two = asked.group_specs()
    story.tell(graded(one, None, None, failure="agent_error", message=where))
    warned = only(story.tell(graded(two)), RunWarned)
    assert [event.message for event in warned] == [
        f"50% of the samples of step 1 failed, most of them (50%) with agent_error: {where}. Correct "
        "the workflow, or set advanced.failed_reward, so that the policy learns to avoid this"
    ]
    assert warned[0].about == "failures"
    next_step = only(story.tell(updated(1)), GroupsRequested)[0]
    one, two = next_step.group_specs()
    story.tell(graded(one, None, None, failure="agent_error", message=where))
    assert not only(story.tell(graded(two)), RunWarned)


def test_failures_that_are_trained_are_told_though_every_sample_failed() -> None:
    story = Story(requested(advanced={"failed_reward": -1.0}))
    asked = only(story.begin(), GroupsRequested)[0]
    one, two = asked.group_specs()
    for spec in (one, two):
        said = story.tell(graded(spec, -1.0, -1.0, failure="timeout", message="450 s"))
    said.then_types(GroupsSettled, RunWarned, BatchAssembled)
    assert "100% of the samples" in only(said, RunWarned)[0].message
    assert "failed_reward" not in only(said, RunWarned)[0].message, "it is set already"


def test_a_step_of_equal_rewards_ends_no_run_though_every_sample_failed() -> None:
    """Twin: without a reward for them, the run ends with their reason."""
    for rewards, ends in (((-1.0, -1.0), StepSkipped), ((None, None), RunFailed)):
        chosen = {"filter_groups": True, "max_replacements": 0, "failed_reward": -1.0}
        story = Story(requested(advanced=chosen))
        for spec in only(story.begin(), GroupsRequested)[0].group_specs():
            said = story.tell(graded(spec, *rewards, failure="timeout", message="450 s"))
        assert only(said, ends)


def test_few_failures_are_not_told() -> None:
    figures = {"rollout/failed_ratio": 0.2, "failed/timeout": 0.2}
    assert frequent_failure(figures) is None
    assert frequent_failure({"rollout/failed_ratio": 0.21, "failed/timeout": 0.21}) == "timeout"


def test_a_group_whose_rewards_have_no_tokens_is_dropped() -> None:
    """Samples that failed before the first answer have a reward, and nothing to train on."""
    asked = only(Story(requested()).begin(), GroupsRequested)[0]
    (spec, _) = asked.group_specs()
    silent = graded(spec, 0.0, -1.0, failure="timeout", message="took longer than 450 s")
    assert settle(silent).dropped is None
    none = tuple(e.model_copy(update={"completion_tokens": 0}) for e in silent.entries)
    dropped = settle(silent.model_copy(update={"entries": none})).dropped
    assert dropped == "timeout: took longer than 450 s"
