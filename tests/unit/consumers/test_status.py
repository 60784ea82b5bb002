"""The status consumer shows the newest stage of each run on its commit, one post at a time."""

import itertools

import pytest
from hypothesis import given as sampled
from hypothesis import strategies as st

from consumers.status import CONSUMER, LONGEST, Stage, Statuses, one_line, status_of
from schemas.effects import Failed, PostStatus, StatusPosted
from schemas.errors import FailureCategory
from schemas.events import (
    CommitStatusDecided,
    CommitStatusPosted,
    Event,
    PushExamined,
    RunFailed,
    RunFinished,
    RunRejected,
    RunStopped,
    TriggerQueued,
    TriggerRefused,
    TriggerSubmitted,
)
from schemas.ids import status_stream
from schemas.specs import CommitStatus, Push, PushOrigin, StatusState, TriggerMatch
from tests.kit.decider import given

PUSH = Push(
    workspace="w1",
    workspace_name="sums",
    url="/srv/sums.git",
    number=3,
    ref="refs/heads/main",
    before="a" * 40,
    after="b" * 40,
)
ORIGIN = PushOrigin(
    push=PUSH,
    match=TriggerMatch(trigger=1, config="configs/training/x.toml"),
    context="headrace/sums/x",
)
RUN = ORIGIN.run
STREAM = status_stream(RUN)

QUEUED = TriggerQueued(workspace="w1", run=RUN, origin=ORIGIN, behind="calm-otter")
SUBMITTED = TriggerSubmitted(workspace="w1", run=RUN, origin=ORIGIN, run_name="x-1")
FINISHED = RunFinished(run=RUN, step=100, held_out=(0.213, 0.9912), origin=ORIGIN)


def status(state: StatusState, text: str, link: str | None = None) -> CommitStatus:
    return CommitStatus(
        workspace="w1", sha="b" * 40, context=ORIGIN.context, state=state, text=text, link=link
    )


WAITS = status("pending", "queued behind run calm-otter")
RUNS = status("pending", "in progress", "/runs/x-1")
DONE = status("success", "held-out reward 0.21 -> 0.99 in 100 steps", "/runs/x-1")


def decided(number: int, stage: Stage, shown: CommitStatus) -> CommitStatusDecided:
    return CommitStatusDecided(
        workspace="w1", subject=RUN, number=number, stage=int(stage), status=shown
    )


def posted(number: int, *, skipped: bool = False, error: str | None = None) -> CommitStatusPosted:
    return CommitStatusPosted(
        workspace="w1", subject=RUN, number=number, skipped=skipped, error=error
    )


def post(number: int, shown: CommitStatus) -> PostStatus:
    return PostStatus(subject=RUN, number=number, status=shown)


def test_each_stage_is_decided_and_posted() -> None:
    first = decided(1, Stage.QUEUED, WAITS)
    given(CONSUMER).when(QUEUED).then(events=[first], effects=[post(1, WAITS)])
    second = decided(2, Stage.SUBMITTED, RUNS)
    given(CONSUMER, first, posted(1)).when(SUBMITTED).then(events=[second], effects=[post(2, RUNS)])
    given(CONSUMER, first, posted(1), second, posted(2)).when(FINISHED).then(
        events=[decided(3, Stage.ENDED, DONE)], effects=[post(3, DONE)]
    )


def test_a_status_waits_for_the_answer_to_the_one_before_and_only_the_newest_follows() -> None:
    history = (decided(1, Stage.QUEUED, WAITS), decided(2, Stage.SUBMITTED, RUNS))
    third = decided(3, Stage.ENDED, DONE)
    given(CONSUMER, *history).when(FINISHED).then(events=[third])
    answer = StatusPosted(post(1, WAITS))
    given(CONSUMER, *history, third).when(answer, stream=STREAM).then(
        events=[posted(1)], effects=[post(3, DONE)]
    )
    given(CONSUMER, *history, third, posted(1)).when(
        StatusPosted(post(3, DONE)), stream=STREAM
    ).then(events=[posted(3)])


def test_a_doubled_or_late_event_decides_nothing() -> None:
    ended = (decided(1, Stage.ENDED, DONE), posted(1))
    for event in (QUEUED, SUBMITTED, FINISHED):
        given(CONSUMER, *ended).when(event).then_nothing()
    given(CONSUMER, decided(1, Stage.SUBMITTED, RUNS)).when(QUEUED).then_nothing()
    given(CONSUMER, *ended).when(StatusPosted(post(1, DONE)), stream=STREAM).then_nothing()


def test_a_status_that_the_forge_refuses_is_recorded_and_not_repeated() -> None:
    refused = Failed(post(1, DONE), FailureCategory.VALIDATION, "the token may not\nwrite statuses")
    given(CONSUMER, decided(1, Stage.ENDED, DONE)).when(refused, stream=STREAM).then(
        events=[posted(1, error="the token may not")]
    )


def test_a_workspace_without_a_token_posts_nothing_and_says_so() -> None:
    answer = StatusPosted(post(1, DONE), skipped=True)
    given(CONSUMER, decided(1, Stage.ENDED, DONE)).when(answer, stream=STREAM).then(
        events=[posted(1, skipped=True)]
    )


@pytest.mark.parametrize(
    ("end", "state", "text"),
    [
        (RunFinished(run=RUN, step=8, origin=ORIGIN), "success", "finished in 8 steps"),
        (
            RunFinished(run=RUN, step=8, reward=0.5, origin=ORIGIN),
            "success",
            "finished in 8 steps, reward 0.50",
        ),
        (RunStopped(run=RUN, step=4, origin=ORIGIN), "error", "stopped at step 4"),
        (RunFailed(run=RUN, kind="crash", message="died", origin=ORIGIN), "error", "died"),
        (
            RunFailed(run=RUN, kind="error", message="\n  bad\tgrade \n at line 3", origin=ORIGIN),
            "failure",
            "bad grade",
        ),
        (RunRejected(run=RUN, message="there is no x", origin=ORIGIN), "failure", "there is no x"),
        (
            TriggerRefused(workspace="w1", run=RUN, origin=ORIGIN, message="no dataset d"),
            "failure",
            "no dataset d",
        ),
    ],
)
def test_every_end_has_a_state_and_one_line(
    end: RunFinished | RunFailed | TriggerRefused, state: StatusState, text: str
) -> None:
    link = None if isinstance(end, TriggerRefused) else f"/runs/{RUN}"
    shown = status(state, text, link)
    given(CONSUMER).when(end).then(
        events=[decided(1, Stage.ENDED, shown)], effects=[post(1, shown)]
    )


def test_a_run_that_waits_for_approval_says_how_to_approve_it() -> None:
    match = ORIGIN.match.model_copy(update={"require_approval": True})
    origin = ORIGIN.model_copy(update={"match": match})
    event = TriggerSubmitted(workspace="w1", run=RUN, origin=origin, run_name="x-1")
    decision = CONSUMER.handle(Statuses(), event, None)  # type: ignore[arg-type]  # not read
    [found] = decision.events
    assert isinstance(found, CommitStatusDecided)
    assert found.status.text == "waits for approval: headrace train approve x-1"


def test_a_wrong_commit_has_a_status_of_its_own() -> None:
    wrong = PushExamined(workspace="w1", push=PUSH, day="2026-11-22", error="unknown key x")
    shown = CommitStatus(
        workspace="w1",
        sha="b" * 40,
        context="headrace/sums",
        state="failure",
        text="unknown key x",
    )
    event = CommitStatusDecided(
        workspace="w1", subject="w1.3", number=1, stage=int(Stage.ENDED), status=shown
    )
    effect = PostStatus(subject="w1.3", number=1, status=shown)
    given(CONSUMER).when(wrong).then(events=[event], effects=[effect])


def test_events_of_other_runs_are_for_nobody() -> None:
    assert CONSUMER.routes(RunFinished(run="r1", step=1)) == ()
    assert CONSUMER.routes(PushExamined(workspace="w1", push=PUSH, day="d", reason="none")) == ()
    assert CONSUMER.routes(FINISHED) == (STREAM,)


@sampled(st.permutations([QUEUED, SUBMITTED, FINISHED]))
def test_in_any_order_the_last_status_is_the_end(order: list[Event]) -> None:
    state = Statuses()
    for event in order:
        decision = CONSUMER.handle(state, event, None)  # type: ignore[arg-type]  # not read
        for made in decision.events:
            state = CONSUMER.evolve(state, made)  # type: ignore[arg-type]  # of its own stream
    assert state.stage is Stage.ENDED
    assert state.status is not None
    assert state.status.state == "success"


@sampled(st.text())
def test_one_line_is_printable_and_short(text: str) -> None:
    line = one_line(text)
    assert line
    assert len(line) <= LONGEST
    assert line.isprintable()
    assert "\n" not in "".join(itertools.chain(line))


def test_held_out_rewards_are_shown_with_their_intervals() -> None:
    ended = FINISHED.model_copy(update={"held_out_intervals": ((0.15, 0.29), (0.95, 1.0))})
    found = status_of(ended, None)
    assert found is not None
    text = "held-out reward 0.21 [0.15, 0.29] -> 0.99 [0.95, 1.00] in 100 steps"
    assert found[1].text == text
