"""run: facts are recorded once, and what follows depends on the state alone."""

from uuid import UUID

import pytest

from consumers.run import CONSUMER
from infra.consumer import Message
from schemas.events import (
    BatchAssembled,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSaved,
    CheckpointSettled,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationSettled,
    Event,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    PolicyFailed,
    PolicyInitialized,
    PolicyUpdated,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunRejected,
    RunRequested,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    RunWarned,
    StepSettled,
    StepSkipped,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import run_stream
from schemas.sampling import Grade, SampleFailure
from schemas.specs import DiscoveredRollout, Entrypoint, GroupSpec, SampleEntry
from tests.kit.decider import Given, When, given
from tests.kit.specs import DATASET, MODEL, config, ref, version

STREAM = run_stream("r1")
RL = {
    "training": {"n_samples_per_prompt": 2, "rollout_batch_size": 2},
    "checkpoints": {"checkpoint_save_freq": 2},
}


def requested(
    *, steps: int = 3, validate: bool = False, **sections: dict[str, object]
) -> RunRequested:
    merged = {**RL, **sections}
    merged["advanced"] = {"max_steps": steps, **sections.get("advanced", {})}
    if validate:
        merged["checkpoints"] = {"checkpoint_save_freq": 100, "eval_interval": 2}
    return RunRequested(
        run="r1",
        run_name="first",
        config=config(**merged),
        model=MODEL,
        dataset=DATASET,
        validation=DATASET if validate else None,
        workspace="w1",
    )


def taught(*, steps: int = 3) -> RunRequested:
    sft = {"algorithm": "sft", "max_steps": steps, "batch_size": 4}
    return RunRequested(
        run="r1",
        run_name="sft",
        config=config(advanced=sft, checkpoints={"checkpoint_save_freq": 2}),
        model=MODEL,
        dataset=DATASET,
    )


def test_a_supervised_run_without_user_code_is_validated_by_its_learner() -> None:
    request = taught().model_copy(update={"validation": DATASET})
    [started] = given(CONSUMER, request).when(request).events
    assert isinstance(started, RunStarted)
    assert started.validation is None
    assert started.spec.validation == DATASET
    first = PolicyInitialized(
        run="r1",
        spec=started.spec,
        state=version(0),
        versions={},
        metrics={"eval/validation/loss": 3.0},
    )
    settled = given(CONSUMER, request, started).when(first).events[0]
    assert isinstance(settled, StepSettled)
    assert (settled.step, settled.metrics) == (0, {"eval/validation/loss": 3.0})


def synced(**changes: object) -> WorkspaceSynced:
    found = {"entrypoint": Entrypoint(rollout="say"), "workflow": "Say", "grader": "Count"}
    return WorkspaceSynced(
        workspace="w1",
        push=UUID(int=1),
        commit="c" * 40,
        snapshot=ref("tree"),
        rollouts=(DiscoveredRollout.model_validate({**found, **changes}),),
        requester=STREAM,
    )


def initialized() -> PolicyInitialized:
    spec = given(CONSUMER, requested()).when(synced()).events[0]
    assert isinstance(spec, RunStarted)
    return PolicyInitialized(
        run="r1", spec=spec.spec, state=version(0), versions={"torch": "2"}, files={"f": ref("f")}
    )


def graded(
    spec: GroupSpec,
    *rewards: float | None,
    failure: str | None = None,
    message: str | None = None,
) -> GroupGraded:
    rewards = rewards or (0.0, 1.0)
    entries = tuple(
        SampleEntry(index=n, failure=failure, message=message, completion_tokens=3)
        for n in range(len(rewards))
    )
    return GroupGraded(
        spec=spec,
        artifact=ref(f"group {spec.group}"),
        entries=entries,
        grades=tuple(Grade(index=n, reward=reward) for n, reward in enumerate(rewards)),
    )


def updated(step: int, *, durable: bool = True) -> PolicyUpdated:
    return PolicyUpdated(
        run="r1",
        step=step,
        state=version(step, durable=durable),
        batch=UUID(int=step),
        metrics={"train/loss": 0.5},
        plan=(12,),
        versions={"torch": "2"},
    )


def saved(request: CheckpointRequested) -> CheckpointSaved:
    return CheckpointSaved(spec=request.spec, manifest=ref(f"manifest {request.spec.step}"))


def validated(request: EvaluationRequested, reward: float = 0.5) -> EvaluationCompleted:
    return EvaluationCompleted(
        evaluation=request.evaluation,
        status="finished",
        reward=reward,
        run="r1",
        step=request.step,
    )


class Story:
    """A run told message by message; answers what the run asks for, like the other consumers would."""

    def __init__(self, request: RunRequested) -> None:
        self.world: Given = given(CONSUMER, request)
        self.told: list[Event] = []

    def tell(self, message: Message) -> When:
        if isinstance(message, (RunPauseRequested, RunResumeRequested, RunStopRequested)):
            self.world = Given(CONSUMER, (*self.world.events, message))
        said = self.world.when(message)
        self.world = said.after()
        self.told += said.events
        assert self.world.when(message).events == [], "a duplicate decides nothing"
        return said

    def begin(self) -> When:
        self.tell(synced())
        return self.tell(initialized())

    def step(self, request: GroupsRequested, *, durable: bool = True) -> When:
        """Grade all groups of a request, take the step."""
        for spec in request.group_specs():
            self.tell(graded(spec))
        return self.tell(updated(request.step, durable=durable))


def only(said: When, kind: type) -> list:
    return [event for event in said.events if isinstance(event, kind)]


def test_a_run_waits_for_its_workspace_and_starts_with_all_that_others_need() -> None:
    given(CONSUMER, requested()).when(requested()).then_nothing()
    (started,) = given(CONSUMER, requested()).when(synced()).then_types(RunStarted).events
    assert isinstance(started, RunStarted)
    assert started.plan.total_steps == 3
    assert started.template is not None
    assert started.template.rollout is not None
    assert started.template.rollout.workflow == "Say"
    given(CONSUMER, requested(), started).when(synced()).then_nothing()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"entrypoint": Entrypoint(rollout="other")}, "no rollouts/say/main.py"),
        ({"error": "rollouts/say/main.py:3: SyntaxError"}, "main.py:3"),
        ({"grader": None}, "no Grader"),
    ],
)
def test_a_workspace_that_cannot_be_run_rejects_it(change: dict[str, object], says: str) -> None:
    (event,) = given(CONSUMER, requested()).when(synced(**change)).events
    assert isinstance(event, RunRejected)
    assert says in event.message


def test_a_named_reward_must_exist() -> None:
    wants = requested(advanced={"rewards": ({"name": "exact"},)})
    (event,) = given(CONSUMER, wants).when(synced(rewards=("other",))).events
    assert isinstance(event, RunRejected)
    assert "exact" in event.message
    (event,) = given(CONSUMER, wants).when(synced(rewards=("exact",), grader=None)).events
    assert isinstance(event, RunStarted)


def test_a_commit_that_cannot_be_fetched_rejects_it() -> None:
    rejected = WorkspaceRejected(
        workspace="w1", push=UUID(int=1), message="no branch x", requester=STREAM
    )
    given(CONSUMER, requested()).when(rejected).then(
        events=[RunRejected(run="r1", message="no branch x")]
    )


def test_what_belongs_to_others_is_not_for_a_run() -> None:
    assert CONSUMER.routes(synced().model_copy(update={"requester": "eval-e1"})) == ()
    completed = EvaluationCompleted(evaluation="e1", status="finished")
    assert CONSUMER.routes(completed) == ()


def test_a_whole_run_in_sync_mode() -> None:
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


def test_a_group_that_cannot_be_used_is_dropped_and_the_others_train() -> None:
    story = Story(requested())
    (_, first) = story.begin().events
    assert isinstance(first, GroupsRequested)
    one, two = first.group_specs()
    (settled,) = story.tell(graded(one, None, 1.0)).events
    assert isinstance(settled, GroupsSettled)
    assert settled.groups[0].dropped is not None
    _, batch = story.tell(graded(two)).events
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
    said.then_types(GroupsSettled, StepSkipped, StepSettled, GroupsRequested)
    settled, following = said.events[2], said.events[3]
    assert isinstance(settled, StepSettled)
    assert settled.state == version(0)
    assert isinstance(following, GroupsRequested)
    assert following.template.policy.weights == version(0).weights


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


def test_what_comes_too_early_or_too_late_decides_nothing() -> None:
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
    story.tell(RunStopRequested(run="r1")).then_nothing()
    checkpoint = story.step(first).then_types(StepSettled, CheckpointRequested).events[1]
    assert isinstance(checkpoint, CheckpointRequested)
    story.tell(saved(checkpoint)).then(
        events=[
            CheckpointSettled(run="r1", step=1, manifest_sha256=ref("manifest 1").sha256),
            RunStopped(run="r1", step=1),
        ]
    )


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


def test_stop_before_the_start_and_while_paused() -> None:
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


def test_sft_goes_through_its_rows_once_an_epoch() -> None:
    story = Story(taught(steps=2))
    story.tell(taught(steps=2))
    one = story.tell(initialized()).events[1]
    two = story.tell(updated(1)).events[1]
    assert isinstance(one, BatchAssembled)
    assert isinstance(two, BatchAssembled)
    assert sorted([*one.rows, *two.rows]) == list(range(8))


def test_validation_before_on_cadence_and_after_the_last() -> None:
    story = Story(requested(steps=3, validate=True))
    said = story.begin()
    (zero,) = only(said, EvaluationRequested)
    assert (zero.step, zero.template.policy.version, len(zero.rows)) == (0, 0, 8)
    requests = only(said, GroupsRequested)
    wanted = []
    while requests:
        said = story.step(requests[0])
        wanted += only(said, EvaluationRequested)
        for checkpoint in only(said, CheckpointRequested):
            said_then = story.tell(saved(checkpoint))
            assert not only(said_then, RunFinished), "a validation is still open"
        requests = only(said, GroupsRequested)
    assert [request.step for request in wanted] == [2, 3]
    for request in [zero, *wanted[:-1]]:
        story.tell(validated(request)).then_types(EvaluationSettled)
    story.tell(validated(wanted[-1])).then_types(EvaluationSettled, RunFinished)


def test_a_validation_that_fails_warns_and_the_run_goes_on() -> None:
    story = Story(requested(validate=True))
    (zero,) = only(story.begin(), EvaluationRequested)
    failed = validated(zero).model_copy(update={"status": "failed", "message": "no reward"})
    _, warning = story.tell(failed).then_types(EvaluationSettled, RunWarned).events
    assert isinstance(warning, RunWarned)
    assert "no reward" in warning.message


def test_a_version_whose_weights_are_not_kept_is_never_validated_as_the_base_model() -> None:
    story = Story(requested(validate=True, steps=4))
    first = only(story.begin(), GroupsRequested)[0]
    second = only(story.step(first), GroupsRequested)[0]
    for spec in second.group_specs():
        said = story.tell(graded(spec))
    (batch,) = only(said, BatchAssembled)
    assert batch.durable, "step 2 will be validated, so its weights are kept"
    bare = updated(2).model_copy(
        update={"state": version(2).model_copy(update={"weights": None, "state": None})}
    )
    assert not only(story.tell(bare), EvaluationRequested)


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
                    update={"failure": SampleFailure(category="validation_error", message="NaN")}
                ),
                half.grades[2],
            )
        }
    )
    _, batch = story.tell(half).then_types(GroupsSettled, BatchAssembled).events
    assert isinstance(batch, BatchAssembled)
    assert batch.groups[0].rewards == (1.0, None, 0.0)
