"""When a run is validated, and which consumer validates it."""

from consumers.run.consumer import CONSUMER
from schemas.events import (
    BatchAssembled,
    CheckpointRequested,
    EvaluationRequested,
    EvaluationSettled,
    GroupsRequested,
    PolicyInitialized,
    RunFinished,
    RunStarted,
    RunWarned,
    StepSettled,
)
from tests.kit.decider import given
from tests.kit.specs import DATASET, version
from tests.unit.consumers.runs import (
    Story,
    graded,
    only,
    requested,
    saved,
    taught,
    updated,
    validated,
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


def test_failed_samples_get_no_reward_in_a_validation() -> None:
    request = requested(validate=True, advanced={"failed_reward": -1.0})
    said = Story(request).begin()
    (wanted,) = only(said, GroupsRequested)
    (validation,) = only(said, EvaluationRequested)
    assert wanted.template.rollout is not None
    assert set(wanted.template.rollout.failed_rewards.values()) == {-1.0}
    assert validation.template.rollout is not None
    assert validation.template.rollout.failed_rewards == {}


def test_a_run_validates_before_the_first_step_on_cadence_and_after_the_last() -> None:
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
