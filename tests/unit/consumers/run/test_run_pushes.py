"""A run that a push started waits for approval, is superseded, and names the push when it ends."""

import pytest

from consumers.run.consumer import CONSUMER
from schemas.events import (
    CheckpointRequested,
    EvaluationRequested,
    Event,
    GroupsRequested,
    PolicyFailed,
    RunApproved,
    RunFailed,
    RunFinished,
    RunRejected,
    RunRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    TriggerFired,
    WorkspaceRejected,
)
from schemas.ids import run_stream
from tests.kit.decider import given
from tests.kit.pushes import origin
from tests.unit.consumers.runs import (
    Story,
    only,
    requested,
    saved,
    synced,
    taught,
    validated,
)

ORIGIN = origin()
APPROVED = RunApproved(run="r1")


def pushed(request: RunRequested, *, approval: bool = False) -> RunRequested:
    match = ORIGIN.match.model_copy(update={"require_approval": approval})
    return request.model_copy(update={"origin": ORIGIN.model_copy(update={"match": match})})


def fired(*supersedes: str) -> TriggerFired:
    new = origin(2)
    return TriggerFired(workspace="w1", run=new.run, origin=new, supersedes=supersedes)


def rejected() -> WorkspaceRejected:
    message = synced()
    return WorkspaceRejected(
        workspace="w1",
        request=message.request,
        message="no such commit",
        requester=message.requester,
    )


def test_a_run_that_waits_for_approval_starts_only_when_it_is_approved() -> None:
    waiting = pushed(taught(), approval=True)
    given(CONSUMER, waiting).when(waiting).then_nothing()
    given(CONSUMER, waiting, APPROVED).when(APPROVED).then_types(RunStarted)
    free = pushed(taught())
    given(CONSUMER, free).when(free).then_types(RunStarted)


def test_an_approved_run_with_user_code_waits_for_its_workspace() -> None:
    waiting = pushed(requested(), approval=True)
    given(CONSUMER, waiting).when(synced()).then_nothing()
    given(CONSUMER, waiting, APPROVED).when(APPROVED).then_nothing()
    said = given(CONSUMER, waiting, APPROVED).when(synced()).then_types(RunStarted)
    said.after().when(APPROVED).then_nothing()
    said.after().when(waiting).then_nothing()


@pytest.mark.parametrize("approval", [False, True])
def test_a_run_that_has_not_started_can_be_stopped(*, approval: bool) -> None:
    request = pushed(requested(), approval=approval)
    stop = RunStopRequested(run="r1")
    said = given(CONSUMER, request, stop).when(stop)
    said.then(events=[RunStopped(run="r1", step=0, origin=request.origin)])
    ended = (request, stop, *said.events, APPROVED)
    given(CONSUMER, *ended).when(APPROVED).then_nothing()
    given(CONSUMER, *ended).when(synced()).then_nothing()


def test_a_superseded_run_stops_and_is_told_so_only_once() -> None:
    request = pushed(requested())
    said = given(CONSUMER, request).when(fired("r1"))
    said.then(
        events=[RunStopRequested(run="r1"), RunStopped(run="r1", step=0, origin=request.origin)]
    )
    said.after().when(fired("r1")).then_nothing()
    stopping = RunStopRequested(run="r1")
    given(CONSUMER, request, stopping).when(fired("r1")).then_types(RunStopped)
    assert CONSUMER.routes(fired("r1", "r2")) == (run_stream("r1"), run_stream("r2"))
    assert CONSUMER.routes(fired()) == ()


def test_a_running_run_that_is_superseded_stops_at_the_boundary() -> None:
    story = Story(pushed(requested(steps=9, checkpoints={"checkpoint_save_freq": 100})))
    first = only(story.begin(), GroupsRequested)[0]
    story.step(first)
    said = story.tell(fired("r1")).then_types(RunStopRequested, CheckpointRequested)
    (checkpoint,) = only(said, CheckpointRequested)
    (stopped,) = only(story.tell(saved(checkpoint)), RunStopped)
    assert (stopped.step, stopped.origin) == (1, ORIGIN)


@pytest.mark.parametrize(
    ("message", "end"),
    [
        (synced(grader=None), RunRejected),
        (rejected(), RunRejected),
        (PolicyFailed(run="r1", step=0, message="no memory", kind="error"), RunFailed),
        (PolicyFailed(run="r1", step=0, message="died", kind="crash"), RunFailed),
    ],
)
def test_every_end_names_the_push(message: Event, end: type[Event]) -> None:
    for request in (pushed(requested()), requested()):
        (ended,) = given(CONSUMER, request).when(message).events
        assert type(ended) is end
        assert isinstance(ended, RunRejected | RunFailed)
        assert ended.origin == request.origin


def test_a_finished_run_names_the_rewards_of_its_first_and_last_validation() -> None:
    story = Story(pushed(requested(steps=3, validate=True)))
    said = story.begin()
    wanted, requests = only(said, EvaluationRequested), only(said, GroupsRequested)
    while requests:
        said = story.step(requests[0])
        wanted += only(said, EvaluationRequested)
        for checkpoint in only(said, CheckpointRequested):
            story.tell(saved(checkpoint))
        requests = only(said, GroupsRequested)
    rewards = {0: 0.25, 2: 0.5, 3: 0.75}
    assert [request.step for request in wanted] == list(rewards)
    late_first = [wanted[1], wanted[2], wanted[0]]
    for request in late_first:
        said = story.tell(validated(request, rewards[request.step or 0]))
    (finished,) = only(said, RunFinished)
    assert finished.held_out == (0.25, 0.75)
    assert finished.held_out_intervals == ((0.25 - 0.1, 0.25 + 0.1), (0.75 - 0.1, 0.75 + 0.1))
    assert finished.origin == ORIGIN


def test_a_run_without_validations_names_no_rewards() -> None:
    story = Story(requested(steps=1))
    requests = only(story.begin(), GroupsRequested)
    (checkpoint,) = only(story.step(requests[0]), CheckpointRequested)
    (finished,) = only(story.tell(saved(checkpoint)), RunFinished)
    assert finished.held_out is None
    assert finished.origin is None
