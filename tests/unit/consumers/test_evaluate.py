"""The evaluate consumer runs every row once, in chunks, and its result counts failures as
failures."""

from uuid import UUID

from consumers.evaluate import CONSUMER
from schemas.config import EvalConfig
from schemas.events import (
    MAX_EVENT_BYTES,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationStarted,
    EvaluationStopRequested,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import eval_stream
from schemas.sampling import Grade
from schemas.specs import DiscoveredRollout, Entrypoint, GroupSpec, SampleEntry
from tests.kit.decider import Given, given
from tests.kit.specs import ref, template

CONFIG = EvalConfig.model_validate(
    {
        "experiment": {
            "rollout": "say",
            "entrypoint": "main.py",
            "model_path": "m",
            "dataset": "sums",
        },
        "advanced": {"network": ("a.example.com:443",)},
    }
)


def requested(*, rows: int = 5, chunk: int = 2, run: str | None = None) -> EvaluationRequested:
    return EvaluationRequested(
        evaluation="e1",
        eval_name="e1",
        template=template(num_samples=1),
        rows=tuple(range(rows)),
        batch_size=chunk,
        pass_threshold=1.0,
        run=run,
        step=4 if run else None,
        config=None if run else CONFIG,
        workspace=None if run else "w1",
    )


SYNCED = WorkspaceSynced(
    workspace="w1",
    push=UUID(int=1),
    commit="c" * 40,
    snapshot=ref("tree"),
    rollouts=(
        DiscoveredRollout(entrypoint=Entrypoint(rollout="say"), workflow="Say", grader="Count"),
    ),
    requester=eval_stream("e1"),
)


def graded(spec: GroupSpec, reward: float | None = 1.0, failure: str | None = None) -> GroupGraded:
    return GroupGraded(
        spec=spec,
        artifact=ref(spec.group),
        entries=(SampleEntry(index=0, failure=failure, message=failure, completion_tokens=2),),
        grades=(Grade(index=0, reward=reward),),
    )


def begun(request: EvaluationRequested) -> Given:
    """An evaluation whose workspace has arrived and whose first chunk is requested."""
    return given(CONSUMER, request).when(SYNCED).after()


def test_it_waits_for_its_workspace_and_asks_for_the_first_chunk() -> None:
    given(CONSUMER).when(requested()).then_nothing()
    said = given(CONSUMER, requested()).when(SYNCED).then_types(EvaluationStarted, GroupsRequested)
    asked = said.events[1]
    assert isinstance(asked, GroupsRequested)
    assert [slot.row for slot in asked.slots] == [0, 1]
    assert asked.template.rollout is not None
    assert asked.template.rollout.network == ("a.example.com:443",)
    said.after().when(SYNCED).then_nothing()


def test_a_runs_validation_starts_at_once() -> None:
    said = given(CONSUMER).when(requested(run="r1")).then_types(EvaluationStarted, GroupsRequested)
    assert said.events[1].stream == eval_stream("e1")
    said.after().when(requested(run="r1")).then_nothing()


def test_chunk_by_chunk_to_the_mean_over_all_graded_samples() -> None:
    world, rewards = begun(requested()), iter([1.0, 0.0, 1.0, None, 1.0])
    while True:
        asked = [e for e in world.events if isinstance(e, GroupsRequested)][-1]
        for spec in asked.group_specs():
            said = world.when(graded(spec, next(rewards)))
            world = said.after()
            world.when(graded(spec, 0.0)).then_nothing()
        if isinstance(said.events[-1], EvaluationCompleted):
            break
        said.then_types(GroupsSettled, GroupsRequested)
    done = said.events[-1]
    assert isinstance(done, EvaluationCompleted)
    assert (done.status, done.reward) == ("finished", 0.75)
    assert done.metrics["eval/pass_rate"] == 0.75
    assert done.metrics["eval/failed"] == 1
    assert done.metrics["eval/count"] == 5


def test_a_chunk_of_any_size_fits_into_its_events() -> None:
    asked = begun(requested(rows=5000, chunk=5000)).events
    requests = [event for event in asked if isinstance(event, GroupsRequested)]
    assert [slot.row for event in requests for slot in event.slots] == list(range(5000))
    assert len({event.name for event in requests}) == len(requests)
    assert max(len(event.model_dump_json().encode()) for event in requests) < MAX_EVENT_BYTES / 2


def test_when_every_sample_fails_the_first_error_is_quoted() -> None:
    world = begun(requested(rows=1))
    (asked,) = [e for e in world.events if isinstance(e, GroupsRequested)]
    (spec,) = asked.group_specs()
    done = world.when(graded(spec, None, "agent_error")).events[-1]
    assert isinstance(done, EvaluationCompleted)
    assert done.status == "failed"
    assert "agent_error" in (done.message or "")


def test_what_cannot_be_synced_or_is_stopped_ends_it() -> None:
    rejected = WorkspaceRejected(
        workspace="w1", push=UUID(int=1), message="no such branch", requester=eval_stream("e1")
    )
    (done,) = given(CONSUMER, requested()).when(rejected).events
    assert isinstance(done, EvaluationCompleted)
    assert (done.status, done.message) == ("failed", "no such branch")
    world = begun(requested())
    (stopped,) = world.when(EvaluationStopRequested(evaluation="e1")).events
    assert isinstance(stopped, EvaluationCompleted)
    assert stopped.status == "stopped"
    after = Given(CONSUMER, (*world.events, stopped))
    (asked,) = [e for e in world.events if isinstance(e, GroupsRequested)]
    after.when(graded(asked.group_specs()[0])).then_nothing()


def test_training_groups_are_not_for_it() -> None:
    spec = GroupSpec(group="r1-train-1-0-0", row=0, template=template())
    assert CONSUMER.routes(graded(spec)) == ()
