"""Pause, resume and stop of a run take effect at a step boundary."""

from schemas.events import (
    BatchAssembled,
    CheckpointRequested,
    CheckpointSettled,
    GroupsRequested,
    GroupsSettled,
    RunPaused,
    RunPauseRequested,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    StepSettled,
)
from tests.kit.specs import ref
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


def test_pause_rests_at_the_boundary_and_resume_goes_on_as_if_nothing_was() -> None:
    calm, paused = Story(requested()), Story(requested())
    first = calm.begin().events[1]
    paused.begin()
    assert isinstance(first, GroupsRequested)
    paused.tell(RunPauseRequested(run="r1")).then_nothing()
    following = calm.step(first).events[1]
    paused.step(first).then_types(StepSettled, RunPaused)
    resumed = paused.tell(RunResumeRequested(run="r1"))
    resumed.then_types(RunResumed, GroupsRequested)
    assert resumed.events[1] == following


def test_a_pause_that_is_taken_back_in_time_never_happens() -> None:
    story = Story(requested())
    first = story.begin().events[1]
    assert isinstance(first, GroupsRequested)
    story.tell(RunPauseRequested(run="r1"))
    story.tell(RunResumeRequested(run="r1")).then_nothing()
    story.step(first).then_types(StepSettled, GroupsRequested)


def test_stop_ends_at_the_boundary_with_a_checkpoint() -> None:
    story = Story(requested(steps=9, checkpoints={"checkpoint_save_freq": 100}))
    first = story.begin().events[1]
    assert isinstance(first, GroupsRequested)
    for spec in first.group_specs():
        story.tell(graded(spec))
    story.tell(RunStopRequested(run="r1")).then_nothing()
    checkpoint = story.tell(updated(1)).then_types(StepSettled, CheckpointRequested).events[1]
    assert isinstance(checkpoint, CheckpointRequested)
    story.tell(saved(checkpoint)).then(
        events=[
            CheckpointSettled(run="r1", step=1, manifest_sha256=ref("manifest 1").sha256),
            RunStopped(run="r1", step=1),
        ]
    )


def test_stop_drops_the_step_that_is_being_sampled() -> None:
    story = Story(requested(steps=9, checkpoints={"checkpoint_save_freq": 100}))
    first = only(story.begin(), GroupsRequested)[0]
    second = only(story.step(first), GroupsRequested)[0]
    one, *_ = second.group_specs()
    story.tell(graded(one)).then_types(GroupsSettled)
    (checkpoint,) = only(story.tell(RunStopRequested(run="r1")), CheckpointRequested)
    assert checkpoint.spec.step == 1
    for spec in second.group_specs()[1:]:
        story.tell(graded(spec)).then_types(GroupsSettled)
    (stopped,) = only(story.tell(saved(checkpoint)), RunStopped)
    assert stopped.step == 1


def test_stop_before_the_first_step_is_trained_ends_at_once() -> None:
    story = Story(requested(steps=9))
    story.begin()
    (stopped,) = only(story.tell(RunStopRequested(run="r1")), RunStopped)
    assert stopped.step == 0


def test_stop_finishes_what_is_sampled_when_the_last_version_is_not_durable() -> None:
    story = Story(requested(steps=9, checkpoints={"checkpoint_save_freq": 100}))
    first = only(story.begin(), GroupsRequested)[0]
    second = only(story.step(first, durable=False), GroupsRequested)[0]
    story.tell(RunStopRequested(run="r1")).then_nothing()
    batches = [
        batch
        for spec in second.group_specs()
        for batch in only(story.tell(graded(spec)), BatchAssembled)
    ]
    assert [batch.durable for batch in batches] == [True]
    story.tell(updated(2)).then_types(StepSettled, CheckpointRequested)


def test_stop_takes_one_more_step_when_the_last_version_is_not_durable() -> None:
    story = Story(taught(steps=9))
    story.tell(taught(steps=9)).then_types(RunStarted)
    batch = story.tell(initialized()).then_types(StepSettled, BatchAssembled).events[1]
    assert isinstance(batch, BatchAssembled)
    assert not batch.durable
    story.tell(RunStopRequested(run="r1")).then_nothing()
    more = story.tell(updated(1, durable=False)).then_types(StepSettled, BatchAssembled).events[1]
    assert isinstance(more, BatchAssembled)
    assert more.durable
    story.tell(updated(2)).then_types(StepSettled, CheckpointRequested)


def test_a_run_stops_before_its_start_and_while_paused() -> None:
    early = Story(requested())
    early.tell(RunStopRequested(run="r1")).then(events=[RunStopped(run="r1", step=0)])
    paused = Story(requested())
    first = paused.begin().events[1]
    assert isinstance(first, GroupsRequested)
    paused.tell(RunPauseRequested(run="r1"))
    paused.step(first).then_types(StepSettled, RunPaused)
    said = paused.tell(RunStopRequested(run="r1"))
    assert only(said, CheckpointRequested), said.events
    assert only(said, RunResumed), "its checkpoint must be claimable"
