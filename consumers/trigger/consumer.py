"""Decides which runs a push starts, and when.
Reads: RefsMoved, RunFinished, RunFailed, RunStopped, RunRejected.  Emits: PushExamined, TriggerQueued,
TriggerSkipped, TriggerFired, TriggerSubmitted, TriggerRefused, TriggerSettled.  Stream: trigger.
Does: reads the triggers of pushed commits (lane: control), submits their runs (lane: submit).
Waits for: the end of the run before, if the trigger queues its runs.
Safe to repeat because: a push is examined once, a run's id follows from its push and trigger, and a run
that was answered decides nothing.

A run is superseded only when its own submission was answered. So there is always a run to stop.
"""

from collections.abc import Iterator

from consumers.trigger.examine import TriggerPorts, examine, submit
from consumers.trigger.refusals import describe_refusal
from consumers.trigger.state import Scope, TriggerEvent, TriggerState, evolve
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.effects import ExaminePush, Failed, PushRead, RunSubmitted, SubmitRun
from schemas.events import (
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
from schemas.ids import ConsumerName, StreamName, trigger_stream
from schemas.specs import Push, PushOrigin, TriggerMatch

LONGEST_QUEUE = 100
"""The most runs that wait in one scope."""

MOST_SCOPES = 1000
"""The most triggers and refs that have a run at the same time."""

OVERTAKEN = "a newer push takes its place"

RunEnd = RunFinished | RunFailed | RunStopped | RunRejected
TriggerMessage = RefsMoved | RunEnd | PushRead | RunSubmitted | Failed


def handle(state: TriggerState, message: TriggerMessage, meta: Meta) -> Decision:
    """Examine pushes, decide on the triggers that they match, and follow the runs."""
    match message:
        case RefsMoved():
            new = (push for push in message.pushes() if push.number not in state.examined)
            return Decision(effects=tuple(ExaminePush(push=push) for push in new))
        case PushRead(effect=effect):
            examined = PushExamined(
                workspace=effect.push.workspace,
                push=effect.push,
                matches=message.matches,
                reason=message.reason,
                error=message.error,
                day=message.day,
            )
            return _decide_on_matches(state, examined)
        case Failed(effect=ExaminePush() as effect):
            examined = PushExamined(
                workspace=effect.push.workspace,
                push=effect.push,
                error=excerpt(message.message),
                day="",
            )
            return _decide_on_matches(state, examined)
        case RunSubmitted(effect=effect):
            return _record_submission(state, effect.origin, message.run_name)
        case Failed(effect=SubmitRun() as effect):
            return _record_refusal(
                state, effect.origin, describe_refusal(message.message, message.issues)
            )
        case Failed():
            return NOTHING
        case _:
            return _settle_run(state, message)


def _decide_on_matches(state: TriggerState, examined: PushExamined) -> Decision:
    """Record what a push matches, and decide on each match in order."""
    if examined.push.number in state.examined:
        return NOTHING
    state = evolve(state, examined)
    events: list[TriggerEvent] = [examined]
    for match in examined.matches:
        origin = PushOrigin(
            push=examined.push,
            match=match,
            context=_context(examined.push, match),
        )
        for event in _decide_on_match(state, origin):
            events.append(event)
            state = evolve(state, event)
    return _with_submissions(events)


def _decide_on_match(state: TriggerState, origin: PushOrigin) -> Iterator[TriggerEvent]:
    match, scope = origin.match, state.scope(origin)
    most = match.max_runs_per_day
    if most is not None and state.count(origin) >= most:
        runs = "1 run of this trigger was" if most == 1 else f"{most} runs of this trigger were"
        yield _skip(origin, f"{runs} started today, the most that it allows")
    elif scope.active is None and len(state.scopes) >= MOST_SCOPES:
        yield _skip(origin, f"{MOST_SCOPES} runs of this repository are in progress")
    elif scope.active is None:
        yield _fire(origin)
    elif match.concurrency == "skip":
        yield _skip(origin, f"run {scope.active} of this trigger is in progress")
    elif match.concurrency == "cancel_previous" and origin.push.number < scope.newest:
        yield _skip(origin, OVERTAKEN)
    elif match.concurrency == "cancel_previous":
        for waiting in scope.queue:
            yield _skip(waiting, OVERTAKEN)
        if scope.active in state.submitting:
            yield _queue(origin, scope.active)
        else:
            yield _fire(origin, supersedes=scope.active)
    elif len(scope.queue) >= LONGEST_QUEUE:
        yield _skip(origin, f"{LONGEST_QUEUE} runs of this trigger wait already")
    else:
        before = [one.run for one in scope.queue if one.push.number < origin.push.number]
        yield _queue(origin, before[-1] if before else scope.active)


def _record_submission(state: TriggerState, origin: PushOrigin, run_name: str) -> Decision:
    """Record that a run was submitted. One that waits to take its place is fired now."""
    if origin.run not in state.submitting:
        return NOTHING
    submitted = TriggerSubmitted(
        workspace=origin.push.workspace, run=origin.run, origin=origin, run_name=run_name
    )
    scope = state.scope(origin)
    events: list[TriggerEvent] = [submitted]
    if scope.active == origin.run and scope.queue:
        following = scope.queue[0]
        if following.match.concurrency == "cancel_previous":
            events.append(_fire(following, supersedes=origin.run))
    return _with_submissions(events)


def _record_refusal(state: TriggerState, origin: PushOrigin, message: str) -> Decision:
    if origin.run not in state.submitting:
        return NOTHING
    refused = TriggerRefused(
        workspace=origin.push.workspace, run=origin.run, origin=origin, message=message
    )
    return _with_submissions([refused, *_fire_following(state.scope(origin), origin.run)])


def _settle_run(state: TriggerState, message: RunEnd) -> Decision:
    """Record the end of an active run, and fire the one that waits for it."""
    origin = message.origin
    if origin is None or state.scope(origin).active != message.run:
        return NOTHING
    settled = TriggerSettled(workspace=origin.push.workspace, run=message.run, origin=origin)
    return _with_submissions([settled, *_fire_following(state.scope(origin), message.run)])


def _fire_following(scope: Scope, ended: str) -> Iterator[TriggerEvent]:
    if scope.active == ended and scope.queue:
        yield _fire(scope.queue[0])


def _with_submissions(events: list[TriggerEvent]) -> Decision:
    """Return a decision with these events, in which every fired trigger submits its run."""
    fired = (event for event in events if isinstance(event, TriggerFired))
    effects = tuple(SubmitRun(origin=event.origin) for event in fired)
    return Decision(events=tuple(events), effects=effects)


def _fire(origin: PushOrigin, *, supersedes: str | None = None) -> TriggerFired:
    return TriggerFired(
        workspace=origin.push.workspace,
        run=origin.run,
        origin=origin,
        supersedes=(supersedes,) if supersedes else (),
    )


def _queue(origin: PushOrigin, behind: str) -> TriggerQueued:
    return TriggerQueued(
        workspace=origin.push.workspace, run=origin.run, origin=origin, behind=behind
    )


def _skip(origin: PushOrigin, reason: str) -> TriggerSkipped:
    return TriggerSkipped(
        workspace=origin.push.workspace, run=origin.run, origin=origin, reason=reason
    )


def _context(push: Push, match: TriggerMatch) -> str:
    """Return the name of the commit status."""
    return f"headrace/{push.workspace_name}/{match.label or match.config}"


def routes(message: TriggerMessage) -> tuple[StreamName, ...]:
    """Return the stream of the triggers of a workspace; none for a run that no push started."""
    match message:
        case RefsMoved():
            return (trigger_stream(message.workspace),) if message.pushes() else ()
        case PushRead() | RunSubmitted() | Failed():
            return ()
        case _:
            return (trigger_stream(message.origin.push.workspace),) if message.origin else ()


async def perform(effect: ExaminePush | SubmitRun, ports: TriggerPorts) -> PushRead | RunSubmitted:
    """Examine a push, or submit a run. Raises Refused when the run is refused, and RepositoryAway when
    the repository does not answer."""
    if isinstance(effect, ExaminePush):
        return await examine(effect, ports)
    return await submit(effect, ports)


CONSUMER: Consumer[
    TriggerState, TriggerEvent, TriggerMessage, ExaminePush | SubmitRun, TriggerPorts
] = Consumer(
    name=ConsumerName("trigger"),
    category="trigger",
    reads=(RefsMoved, RunFinished, RunFailed, RunStopped, RunRejected),
    emits=(
        PushExamined,
        TriggerQueued,
        TriggerSkipped,
        TriggerFired,
        TriggerSubmitted,
        TriggerRefused,
        TriggerSettled,
    ),
    effects=(ExaminePush, SubmitRun),
    initial=TriggerState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=TriggerPorts,
    snapshots=TriggerState,
)
