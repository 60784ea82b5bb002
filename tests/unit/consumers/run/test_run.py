"""The run consumer records facts once, and its next requests depend on its state alone."""

from typing import Any
from uuid import UUID

import pytest

from consumers.run.consumer import CONSUMER
from schemas.errors import FailureCategory
from schemas.events import (
    BatchAssembled,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSettled,
    EvaluationCompleted,
    GroupsRequested,
    GroupsSettled,
    PolicyFailed,
    RunFailed,
    RunFinished,
    RunRejected,
    RunStarted,
    RunWarned,
    StepSettled,
    StepSkipped,
    WorkspaceRejected,
)
from schemas.learner import RULES
from schemas.sampling import SampleFailure, SamplingParams
from schemas.specs import Entrypoint, PackageEnvironment
from tests.kit.decider import given
from tests.kit.specs import config, ref, version
from tests.unit.consumers.runs import (
    STREAM,
    Story,
    graded,
    initialized,
    only,
    requested,
    saved,
    synced,
    taught,
    updated,
)


def test_a_run_waits_for_its_workspace_and_starts_with_all_that_others_need() -> None:
    given(CONSUMER, requested()).when(requested()).then_nothing()
    (started,) = given(CONSUMER, requested()).when(synced()).then_types(RunStarted).events
    assert isinstance(started, RunStarted)
    assert started.plan.total_steps == 3
    assert started.template is not None
    assert started.template.rollout is not None
    assert started.template.rollout.workflow == "Say"
    given(CONSUMER, requested(), started).when(synced()).then_nothing()


def test_a_run_and_its_replays_have_the_packages_that_were_chosen_at_sync() -> None:
    chosen = PackageEnvironment(
        key="e" * 64, lock=ref("pins"), python="3.12", platform="linux-x86_64"
    )
    (started,) = given(CONSUMER, requested()).when(synced(environment=chosen)).events
    assert isinstance(started, RunStarted)
    assert started.template is not None
    assert started.template.rollout is not None
    assert started.template.rollout.environment == chosen


def test_the_addresses_of_a_run_are_those_of_its_code() -> None:
    wants = requested(advanced={"network": ("a.example.com:443",)})
    (started,) = given(CONSUMER, wants).when(synced()).then_types(RunStarted).events
    assert isinstance(started, RunStarted)
    assert started.template is not None
    assert started.template.rollout is not None
    assert started.template.rollout.network == ("a.example.com:443",)


@pytest.mark.parametrize(("key", "day"), [(None, "2026-11-22"), ("2025-01-02", "2025-01-02")])
def test_the_day_of_the_request_is_the_runs_unless_a_key_names_another(
    key: str | None, day: str
) -> None:
    wants = requested(validate=True, advanced={"date": key} if key else {})
    wants = wants.model_copy(update={"date": "2026-11-22"})
    (started,) = given(CONSUMER, wants).when(synced()).then_types(RunStarted).events
    assert isinstance(started, RunStarted)
    assert started.spec.date == day
    assert started.template is not None
    assert started.validation is not None
    assert started.template.params.date == started.validation.params.date == day
    assert started.spec.rules == RULES


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_new_run_lets_c_decode_its_model_unless_it_is_deterministic(deterministic: bool) -> None:
    """Those that have begun have not said so, and keep their bits."""
    wants = requested(validate=True, advanced={"deterministic": deterministic})
    (started,) = given(CONSUMER, wants).when(synced()).then_types(RunStarted).events
    assert isinstance(started, RunStarted)
    for template in (started.template, started.validation):
        assert template is not None
        assert template.params.allows_wide_native is not deterministic
        old = template.params.model_dump(mode="json", exclude={"allows_wide_native"})
        begun = SamplingParams.model_validate(old)
        assert (begun.allows_wide_native, begun.model_dump(mode="json")) == (False, old)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"entrypoint": Entrypoint(rollout="other")}, "no rollouts/say/main.py"),
        ({"error": "rollouts/say/main.py:3: SyntaxError"}, "main.py:3"),
        ({"grader": None}, "no Grader"),
    ],
)
def test_a_workspace_that_cannot_be_run_rejects_it(change: dict[str, Any], says: str) -> None:
    (event,) = given(CONSUMER, requested()).when(synced(**change)).events
    assert isinstance(event, RunRejected)
    assert says in event.message


def test_a_rollout_server_needs_no_grader_and_takes_no_rewards() -> None:
    server = synced(kind="server", workflow=None, grader=None)
    (started,) = given(CONSUMER, requested()).when(server).then_types(RunStarted).events
    assert isinstance(started, RunStarted)
    assert started.template is not None
    assert started.template.rollout is not None
    assert started.template.rollout.kind == "server"
    wants = requested(advanced={"rewards": ({"name": "exact"},)})
    (event,) = given(CONSUMER, wants).when(server).events
    assert isinstance(event, RunRejected)
    assert "leave advanced.rewards out" in event.message


def test_a_named_reward_must_exist() -> None:
    wants = requested(advanced={"rewards": ({"name": "exact"},)})
    (event,) = given(CONSUMER, wants).when(synced(rewards=("other",))).events
    assert isinstance(event, RunRejected)
    assert "exact" in event.message
    (event,) = given(CONSUMER, wants).when(synced(rewards=("exact",), grader=None)).events
    assert isinstance(event, RunStarted)


def test_a_commit_that_cannot_be_fetched_rejects_it() -> None:
    rejected = WorkspaceRejected(
        workspace="w1", request=UUID(int=1), message="no branch x", requester=STREAM
    )
    given(CONSUMER, requested()).when(rejected).then(
        events=[RunRejected(run="r1", message="no branch x")]
    )


def test_events_of_others_are_not_for_a_run() -> None:
    assert CONSUMER.routes(synced().model_copy(update={"requester": "eval-e1"})) == ()
    completed = EvaluationCompleted(evaluation="e1", status="finished")
    assert CONSUMER.routes(completed) == ()


def test_a_run_in_sync_mode_steps_saves_and_finishes() -> None:
    story = Story(requested())
    (_, first) = story.begin().then_types(StepSettled, GroupsRequested).events
    assert isinstance(first, GroupsRequested)
    assert (first.step, first.template.policy.version) == (1, 0)
    said = story.step(first)
    settled, second = said.then_types(StepSettled, GroupsRequested).events
    assert isinstance(settled, StepSettled)
    assert settled.metrics["rollout/raw_reward"] == 0.5
    assert settled.metrics["train/loss"] == 0.5
    assert isinstance(second, GroupsRequested)
    assert second.template.policy.version == 1
    settled, checkpoint, third = (
        story.step(second).then_types(StepSettled, CheckpointRequested, GroupsRequested).events
    )
    assert isinstance(checkpoint, CheckpointRequested)
    assert (checkpoint.spec.step, checkpoint.spec.parent) == (2, None)
    assert checkpoint.spec.files == {"f": ref("f")}
    story.tell(saved(checkpoint)).then_types(CheckpointSettled)
    assert isinstance(third, GroupsRequested)
    _, last = story.step(third).then_types(StepSettled, CheckpointRequested).events
    assert isinstance(last, CheckpointRequested)
    assert last.spec.parent == ref("manifest 2").sha256
    story.tell(saved(last)).then_types(CheckpointSettled, RunFinished)
    rows = [slot.row for e in story.told if isinstance(e, GroupsRequested) for slot in e.slots]
    assert len(rows) == len(set(rows)) == 6, "no row comes twice in an epoch"


def test_a_batch_is_in_slot_order_whoever_finishes_first() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    one, two = first.group_specs()
    story.tell(graded(two)).then_types(GroupsSettled)
    _, batch = story.tell(graded(one)).then_types(GroupsSettled, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert [group.slot for group in batch.groups] == [0, 1]


WARNED = (GroupsSettled, RunWarned)
"""A group is settled, and too many samples of its step failed."""


def test_a_group_that_cannot_be_used_is_dropped_and_the_others_train() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    one, two = first.group_specs()
    (settled,) = story.tell(graded(one, None, 1.0)).events
    assert isinstance(settled, GroupsSettled)
    assert settled.groups[0].dropped is not None
    _, _, batch = story.tell(graded(two)).then_types(*WARNED, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert [group.slot for group in batch.groups] == [1]
    assert batch.metrics["rollout/dropped_groups"] == 1


def test_a_step_without_any_usable_group_is_skipped() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    one, two = first.group_specs()
    story.tell(graded(one, None, None))
    said = story.tell(graded(two, None, 1.0))
    said.then_types(*WARNED, StepSkipped, StepSettled, GroupsRequested)
    settled, following = said.events[3], said.events[4]
    assert isinstance(settled, StepSettled)
    assert settled.state == version(0)
    assert isinstance(following, GroupsRequested)
    assert following.template.policy.weights == version(0).weights


def test_failed_samples_are_counted_by_their_reason() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    one, two = first.group_specs()
    story.tell(graded(one, None, None, failure="prompt_too_long", message="900 tokens"))
    batch = only(story.tell(graded(two)), BatchAssembled)[0]
    assert batch.metrics["rollout/failed_ratio"] == 0.5
    named = {name: share for name, share in batch.metrics.items() if name.startswith("failed/")}
    assert named == {"failed/prompt_too_long": 0.5}


def test_a_step_in_which_every_sample_failed_ends_the_run_with_the_first_error() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    one, two = first.group_specs()
    story.tell(graded(one, None, None, failure="agent_error", message="no luck"))
    said = story.tell(graded(two, None, None, failure="agent_error", message="later"))
    failed = said.then_types(GroupsSettled, RunFailed).events[1]
    assert isinstance(failed, RunFailed)
    assert "agent_error: no luck" in failed.message
    story.tell(updated(1)).then_nothing()


def test_events_that_come_too_early_or_too_late_decide_nothing() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    story.tell(updated(1)).then_nothing()
    story.step(first)
    story.tell(graded(first.group_specs()[0])).then_nothing()


@pytest.mark.parametrize("kind", ["error", "crash"])
def test_a_learner_that_gives_up_ends_the_run(kind: str) -> None:
    story = Story(requested())
    story.begin()
    failed = PolicyFailed.model_validate({"run": "r1", "step": 1, "kind": kind, "message": "NaN"})
    (event,) = story.tell(failed).events
    assert isinstance(event, RunFailed)
    assert event.kind == kind
    assert "step 1" in event.message


def test_a_checkpoint_that_cannot_be_put_ends_the_run() -> None:
    story = Story(requested())
    story.begin()
    failed = CheckpointFailed(run="r1", step=2, message="the disk is full")
    (event,) = story.tell(failed).events
    assert isinstance(event, RunFailed)
    assert "last good one: none" in event.message


def test_sft_goes_through_its_rows_once_an_epoch() -> None:
    story = Story(taught(steps=2))
    story.tell(taught(steps=2))
    one = story.tell(initialized()).events[1]
    two = story.tell(updated(1)).events[1]
    assert isinstance(one, BatchAssembled)
    assert isinstance(two, BatchAssembled)
    assert sorted([*one.rows, *two.rows]) == list(range(8))


def test_a_run_on_recorded_groups_requests_none_and_goes_through_its_rows() -> None:
    """The rules of a run that samples nothing, with the batch of one that does."""
    offline = {"execution_mode": "offline", "max_steps": 2}
    asked = taught().model_copy(
        update={"config": config(advanced=offline, training={"rollout_batch_size": 4})}
    )
    story = Story(asked)
    [started] = story.tell(asked).events
    assert isinstance(started, RunStarted)
    assert (started.plan.batch_size, started.template) == (4, None)
    one = story.tell(initialized()).events[1]
    two = story.tell(updated(1)).events[1]
    assert isinstance(one, BatchAssembled)
    assert isinstance(two, BatchAssembled)
    assert not one.groups
    assert sorted([*one.rows, *two.rows]) == list(range(8))


def test_an_ungraded_sample_stays_out_of_the_baseline() -> None:
    story = Story(requested(training={"n_samples_per_prompt": 3, "rollout_batch_size": 1}))
    first = story.begin().events[1]
    assert isinstance(first, GroupsRequested)
    (spec,) = first.group_specs()
    half = graded(spec, 1.0, float("nan"), 0.0)
    half = half.model_copy(
        update={
            "grades": (
                half.grades[0],
                half.grades[1].model_copy(
                    update={
                        "failure": SampleFailure(category=FailureCategory.VALIDATION, message="NaN")
                    }
                ),
                half.grades[2],
            )
        }
    )
    _, _, batch = story.tell(half).then_types(*WARNED, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert batch.groups[0].rewards == (1.0, None, 0.0)
