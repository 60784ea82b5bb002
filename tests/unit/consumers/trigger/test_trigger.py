"""The trigger consumer: which runs a push starts, in which order, and never twice."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given as sampled
from hypothesis import strategies as st

from consumers.trigger.consumer import CONSUMER, LONGEST_QUEUE
from consumers.trigger.state import TriggerState, scope_of
from schemas.effects import ExaminePush, Failed, PushRead, RunSubmitted, SubmitRun
from schemas.errors import FailureCategory, Issue
from schemas.events import (
    Event,
    PushExamined,
    RefsMoved,
    RunFailed,
    RunFinished,
    RunRejected,
    RunStopped,
    TriggerFired,
    TriggerQueued,
    TriggerRefused,
    TriggerSettled,
    TriggerSkipped,
    TriggerSubmitted,
)
from schemas.ids import trigger_stream
from schemas.specs import Concurrency, Push, PushOrigin, RefMove, TriggerMatch
from tests.kit.decider import given
from tests.kit.property_examples import examples

STREAM = trigger_stream("w1")
CONFIG = "configs/training/x.toml"
DAY = "2026-11-22"
MAIN = "refs/heads/main"


def push(number: int, ref: str = MAIN) -> Push:
    return Push(
        workspace="w1",
        workspace_name="sums",
        url="/srv/sums.git",
        number=number,
        ref=ref,
        before=f"{number - 1:040x}",
        after=f"{number:040x}",
    )


def match(
    concurrency: Concurrency = "queue",
    trigger: int = 1,
    config: str = CONFIG,
    label: str = "x",
    **more: Any,
) -> TriggerMatch:
    return TriggerMatch(
        trigger=trigger, config=config, label=label, concurrency=concurrency, **more
    )


def origin(
    number: int,
    concurrency: Concurrency = "queue",
    *,
    ref: str = MAIN,
    context: str = "headrace/sums/x",
    **more: Any,
) -> PushOrigin:
    return PushOrigin(push=push(number, ref), match=match(concurrency, **more), context=context)


def read(number: int, *matches: TriggerMatch, ref: str = MAIN, day: str = DAY) -> PushRead:
    return PushRead(ExaminePush(push=push(number, ref)), day=day, matches=matches)


def examined(number: int, *matches: TriggerMatch, ref: str = MAIN, day: str = DAY) -> PushExamined:
    return PushExamined(workspace="w1", push=push(number, ref), matches=matches, day=day)


def fired(of: PushOrigin, *supersedes: str) -> TriggerFired:
    return TriggerFired(workspace="w1", run=of.run, origin=of, supersedes=supersedes)


def submitted(of: PushOrigin) -> TriggerSubmitted:
    return TriggerSubmitted(workspace="w1", run=of.run, origin=of, run_name="x-1")


def queued(of: PushOrigin, behind: str) -> TriggerQueued:
    return TriggerQueued(workspace="w1", run=of.run, origin=of, behind=behind)


def skipped(of: PushOrigin, reason: str) -> TriggerSkipped:
    return TriggerSkipped(workspace="w1", run=of.run, origin=of, reason=reason)


def settled(of: PushOrigin) -> TriggerSettled:
    return TriggerSettled(workspace="w1", run=of.run, origin=of)


def moved(*numbers: int, after: bool = True, baseline: bool = False) -> RefsMoved:
    moves = tuple(
        RefMove(
            ref=MAIN,
            before=f"{number - 1:040x}",
            after=f"{number:040x}" if after else None,
            number=number,
        )
        for number in numbers
    )
    return RefsMoved(
        workspace="w1",
        workspace_name="sums",
        url="/srv/sums.git",
        round=1,
        moves=moves,
        baseline=baseline,
    )


def test_each_moved_ref_is_examined_once() -> None:
    effects = [ExaminePush(push=push(1)), ExaminePush(push=push(2))]
    given(CONSUMER).when(moved(1, 2)).then(effects=effects)
    given(CONSUMER, examined(1)).when(moved(1, 2)).then(effects=effects[1:])
    given(CONSUMER, examined(1), examined(2)).when(moved(1, 2)).then_nothing()


def test_a_baseline_and_a_deleted_ref_are_no_pushes() -> None:
    given(CONSUMER).when(moved(1, baseline=True)).then_nothing()
    given(CONSUMER).when(moved(1, after=False)).then_nothing()


def test_a_match_fires_and_is_submitted() -> None:
    one = origin(1)
    given(CONSUMER).when(read(1, match()), stream=STREAM).then(
        events=[examined(1, match()), fired(one)], effects=[SubmitRun(origin=one)]
    )
    given(CONSUMER, examined(1, match()), fired(one)).when(
        RunSubmitted(SubmitRun(origin=one), "x-1"), stream=STREAM
    ).then(events=[submitted(one)])


def test_a_second_outcome_decides_nothing() -> None:
    one = origin(1)
    history = (examined(1, match()), fired(one), submitted(one))
    given(CONSUMER, *history).when(read(1, match()), stream=STREAM).then_nothing()
    again = RunSubmitted(SubmitRun(origin=one), "x-1")
    given(CONSUMER, *history).when(again, stream=STREAM).then_nothing()
    failed = Failed(SubmitRun(origin=one), FailureCategory.VALIDATION, "no")
    given(CONSUMER, *history).when(failed, stream=STREAM).then_nothing()


def test_a_push_without_matches_says_why() -> None:
    effect = ExaminePush(push=push(1))
    for outcome, event in (
        (PushRead(effect, DAY, reason="r"), {"reason": "r", "day": DAY}),
        (PushRead(effect, DAY, error="e"), {"error": "e", "day": DAY}),
        (Failed(effect, FailureCategory.CRASH, "died"), {"error": "died", "day": ""}),
    ):
        expected = PushExamined.model_validate({"workspace": "w1", "push": push(1), **event})
        given(CONSUMER).when(outcome, stream=STREAM).then(events=[expected])


def test_queue_waits_for_the_end_of_the_run_before_in_order() -> None:
    one, two, three = origin(1), origin(2), origin(3)
    history: list[Event] = [examined(1, match()), fired(one), submitted(one)]
    given(CONSUMER, *history).when(read(2, match()), stream=STREAM).then(
        events=[examined(2, match()), queued(two, one.run)]
    )
    history += [examined(2, match()), queued(two, one.run)]
    given(CONSUMER, *history).when(read(3, match()), stream=STREAM).then(
        events=[examined(3, match()), queued(three, two.run)]
    )
    history += [examined(3, match()), queued(three, two.run)]
    end = RunFinished(run=one.run, step=3, origin=one)
    given(CONSUMER, *history).when(end).then(
        events=[settled(one), fired(two)], effects=[SubmitRun(origin=two)]
    )
    history += [settled(one), fired(two)]
    given(CONSUMER, *history).when(end).then_nothing()


@pytest.mark.parametrize("kind", ["finished", "failed", "stopped", "rejected"])
def test_every_end_frees_the_place(kind: str) -> None:
    one, two = origin(1), origin(2)
    ends: dict[str, Event] = {
        "finished": RunFinished(run=one.run, step=1, origin=one),
        "failed": RunFailed(run=one.run, kind="error", message="m", origin=one),
        "stopped": RunStopped(run=one.run, step=1, origin=one),
        "rejected": RunRejected(run=one.run, message="m", origin=one),
    }
    history = (examined(1, match()), fired(one), examined(2, match()), queued(two, one.run))
    given(CONSUMER, *history).when(ends[kind]).then(
        events=[settled(one), fired(two)], effects=[SubmitRun(origin=two)]
    )


def test_a_refused_run_frees_the_place_and_the_message_is_recorded() -> None:
    one, two = origin(1), origin(2)
    history = (examined(1, match()), fired(one), examined(2, match()), queued(two, one.run))
    refused = TriggerRefused(workspace="w1", run=one.run, origin=one, message="no dataset d")
    failed = Failed(SubmitRun(origin=one), FailureCategory.VALIDATION, "no dataset d")
    given(CONSUMER, *history).when(failed, stream=STREAM).then(
        events=[refused, fired(two)], effects=[SubmitRun(origin=two)]
    )


def test_an_end_that_comes_before_the_answer_to_the_submission_frees_the_place_once() -> None:
    one = origin(1)
    history = (examined(1, match()), fired(one), settled(one))
    answer = RunSubmitted(SubmitRun(origin=one), "x-1")
    given(CONSUMER, *history).when(answer, stream=STREAM).then(events=[submitted(one)])


def test_skip_skips_while_a_run_is_active() -> None:
    one, two = origin(1, "skip"), origin(2, "skip")
    history = (examined(1, match("skip")), fired(one), submitted(one))
    reason = f"run {one.run} of this trigger is in progress"
    given(CONSUMER, *history).when(read(2, match("skip")), stream=STREAM).then(
        events=[examined(2, match("skip")), skipped(two, reason)]
    )
    given(CONSUMER, *history, settled(one)).when(read(2, match("skip")), stream=STREAM).then(
        events=[examined(2, match("skip")), fired(two)], effects=[SubmitRun(origin=two)]
    )


def test_cancel_previous_supersedes_the_active_run() -> None:
    one, two = origin(1, "cancel_previous"), origin(2, "cancel_previous")
    kind = match("cancel_previous")
    history = [examined(1, kind), fired(one), submitted(one)]
    given(CONSUMER, *history).when(read(2, kind), stream=STREAM).then(
        events=[examined(2, kind), fired(two, one.run)], effects=[SubmitRun(origin=two)]
    )
    superseded = [*history, examined(2, kind), fired(two, one.run), submitted(two)]
    given(CONSUMER, *superseded).when(RunStopped(run=one.run, step=1, origin=one)).then_nothing()


def test_cancel_previous_waits_until_there_is_a_run_to_stop_and_keeps_only_the_newest() -> None:
    kind = match("cancel_previous")
    one, two, three = (origin(n, "cancel_previous") for n in (1, 2, 3))
    history = [examined(1, kind), fired(one)]
    given(CONSUMER, *history).when(read(2, kind), stream=STREAM).then(
        events=[examined(2, kind), queued(two, one.run)]
    )
    history += [examined(2, kind), queued(two, one.run)]
    newer = [skipped(two, "a newer push takes its place"), queued(three, one.run)]
    given(CONSUMER, *history).when(read(3, kind), stream=STREAM).then(
        events=[examined(3, kind), *newer]
    )
    answer = RunSubmitted(SubmitRun(origin=one), "x-1")
    given(CONSUMER, *history, examined(3, kind), *newer).when(answer, stream=STREAM).then(
        events=[submitted(one), fired(three, one.run)], effects=[SubmitRun(origin=three)]
    )


def test_the_daily_limit_counts_runs_of_all_refs_and_ends_with_the_day() -> None:
    kind = match(max_runs_per_day=1)
    one = origin(1, max_runs_per_day=1)
    two = origin(2, ref="refs/heads/dev", max_runs_per_day=1)
    history = (examined(1, kind), fired(one), submitted(one), settled(one))
    reason = "1 run of this trigger was started today, the most that it allows"
    given(CONSUMER, *history).when(read(2, kind, ref="refs/heads/dev"), stream=STREAM).then(
        events=[examined(2, kind, ref="refs/heads/dev"), skipped(two, reason)]
    )
    tomorrow = read(2, kind, ref="refs/heads/dev", day="2026-11-23")
    given(CONSUMER, *history).when(tomorrow, stream=STREAM).then_types(
        PushExamined, TriggerFired, SubmitRun
    )


def test_refs_and_triggers_do_not_wait_for_one_another() -> None:
    other = match(trigger=2, config="configs/training/y.toml")
    decision = given(CONSUMER).when(read(1, match(), other), stream=STREAM)
    decision.then_types(PushExamined, TriggerFired, TriggerFired, SubmitRun, SubmitRun)
    history = (examined(1, match()), fired(origin(1)))
    elsewhere = read(2, match(), ref="refs/heads/dev")
    given(CONSUMER, *history).when(elsewhere, stream=STREAM).then_types(
        PushExamined, TriggerFired, SubmitRun
    )


def test_the_label_of_a_trigger_names_its_status() -> None:
    both = (match(label="x"), match(trigger=2, label="x#2"))
    decision = given(CONSUMER).when(read(1, *both), stream=STREAM)
    contexts = [e.origin.context for e in decision.effects if isinstance(e, SubmitRun)]
    assert contexts == ["headrace/sums/x", "headrace/sums/x#2"]


def test_a_push_that_is_examined_late_keeps_its_place() -> None:
    one, two, three = origin(1), origin(2), origin(3)
    history = [examined(1, match()), fired(one), examined(3, match()), queued(three, one.run)]
    late = given(CONSUMER, *history).when(read(2, match()), stream=STREAM)
    late.then(events=[examined(2, match()), queued(two, one.run)])
    end = RunFinished(run=one.run, step=1, origin=one)
    late.after().when(end).then(events=[settled(one), fired(two)], effects=[SubmitRun(origin=two)])


def test_a_push_that_is_examined_late_stops_no_run_of_a_newer_one() -> None:
    one, two = origin(1, "cancel_previous"), origin(2, "cancel_previous")
    kind = match("cancel_previous")
    for answered in ((), (submitted(two),)):
        history = [examined(2, kind), fired(two), *answered]
        given(CONSUMER, *history).when(read(1, kind), stream=STREAM).then(
            events=[examined(1, kind), skipped(one, "a newer push takes its place")]
        )


def test_a_refusal_names_the_first_issues() -> None:
    one = origin(1)
    issues = tuple(Issue(f"training.k{n}", "is unknown", "training.lr") for n in range(9))
    failed = Failed(
        SubmitRun(origin=one), FailureCategory.VALIDATION, "training.k0: is unknown", issues=issues
    )
    history = (examined(1, match()), fired(one))
    [refused] = given(CONSUMER, *history).when(failed, stream=STREAM).events
    assert isinstance(refused, TriggerRefused)
    lines = refused.message.splitlines()
    assert len(lines) == 5
    assert lines[4] == "training.k4: is unknown; did you mean training.lr?"


def test_the_scopes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.trigger.consumer.MOST_SCOPES", 2)
    history: list[Event] = []
    for number in (1, 2):
        ref = f"refs/heads/b{number}"
        history += [examined(number, match(), ref=ref), fired(origin(number, ref=ref))]
    decision = given(CONSUMER, *history).when(read(3, match(), ref="refs/heads/b3"), stream=STREAM)
    assert isinstance(decision.events[-1], TriggerSkipped)


def test_the_queue_is_bounded() -> None:
    one = origin(1)
    history: list[Event] = [examined(1, match()), fired(one), submitted(one)]
    behind = one.run
    for number in range(2, LONGEST_QUEUE + 2):
        history += [examined(number, match()), queued(origin(number), behind)]
        behind = origin(number).run
    decision = given(CONSUMER, *history).when(read(LONGEST_QUEUE + 2, match()), stream=STREAM)
    assert isinstance(decision.events[-1], TriggerSkipped)


class Simulation:
    """A trigger stream, its effects, and the runs that were fired and have not ended."""

    def __init__(self) -> None:
        self.state = TriggerState()
        self.effects: list[SubmitRun] = []
        self.begun: list[PushOrigin] = []
        self.running: list[PushOrigin] = []
        self.superseded: set[str] = set()

    def decide(self, message: Any) -> None:
        decision = CONSUMER.handle(self.state, message, None)  # type: ignore[arg-type]  # not read
        for event in decision.events:
            self.state = CONSUMER.evolve(self.state, event)  # type: ignore[arg-type]  # of its stream
            if isinstance(event, TriggerFired):
                assert event.run not in {o.run for o in self.begun}, "a run is fired once"
                older = {o.run for o in self.running if o.push.number < event.origin.push.number}
                assert older >= set(event.supersedes), "a run that exists, of an older push"
                self.superseded |= set(event.supersedes)
                self.begun.append(event.origin)
        self.effects += [e for e in decision.effects if isinstance(e, SubmitRun)]

    def submit(self, index: int) -> None:
        if self.effects:
            effect = self.effects.pop(index % len(self.effects))
            self.running.append(effect.origin)
            self.decide(RunSubmitted(effect, "name"))

    def end(self, index: int) -> None:
        if self.running:
            one = self.running.pop(index % len(self.running))
            end = RunFinished(run=one.run, step=1, origin=one)
            self.decide(end)
            self.decide(end)


STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "submit", "end"]), st.integers(0, 5)), max_size=60
)


@examples(150)
@sampled(STEPS, st.sampled_from(["queue", "cancel_previous", "skip"]))
def test_in_any_order_each_match_fires_at_most_once_and_none_is_forgotten(
    steps: Sequence[tuple[str, int]], kind: Literal["queue", "cancel_previous", "skip"]
) -> None:
    world, pushes = Simulation(), 0
    for what, index in steps:
        if what == "push":
            pushes += 1
            world.decide(read(pushes, match(kind)))
        elif what == "submit":
            world.submit(index)
        else:
            world.end(index)
        alive = {o.run for o in world.begun} - world.superseded
        ended = alive - {o.run for o in world.running} - {e.origin.run for e in world.effects}
        assert len(alive - ended) <= 1, "one run of a trigger and ref at a time"
    while world.effects or world.running:
        world.submit(0)
        world.end(0)
    numbers = [o.push.number for o in world.begun]
    assert numbers == sorted(numbers)
    if kind == "queue":
        assert numbers == list(range(1, pushes + 1)), "every push has had its turn"
    elif pushes and kind == "cancel_previous":
        assert numbers[-1] == pushes, "the newest push has had its turn"
    assert world.state.scopes == {}
    assert scope_of(origin(1)) not in world.state.scopes


@examples(150)
@sampled(
    st.permutations(range(1, 8)),
    st.lists(st.sampled_from(["read", "submit", "end"]), max_size=40),
    st.sampled_from(["queue", "cancel_previous"]),
)
def test_examinations_in_any_order_fire_every_push_once_and_stop_no_newer_run(
    order: Sequence[int], steps: Sequence[str], kind: Literal["queue", "cancel_previous"]
) -> None:
    world, unread = Simulation(), list(order)
    for what in [*steps, *("read" for _ in order)]:
        if what == "read" and unread:
            number = unread.pop()
            world.decide(read(number, match(kind)))
            world.decide(read(number, match(kind)))
        elif what == "submit":
            world.submit(0)
        elif what == "end":
            world.end(0)
    while world.effects or world.running:
        world.submit(0)
        world.end(0)
    numbers = [one.push.number for one in world.begun]
    if kind == "queue":
        assert sorted(numbers) == sorted(order)
    assert max(order) in numbers
    assert world.state.scopes == {}
