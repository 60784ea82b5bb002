"""Shows on each commit what became of the runs that its push started.
Reads: PushExamined, TriggerQueued, TriggerSubmitted, TriggerRefused, RunFinished, RunFailed, RunStopped,
RunRejected.  Emits: CommitStatusDecided, CommitStatusPosted.  Stream: status.
Does: posts commit statuses through the forge's API (lane: control).  Waits for: nothing.
Safe to repeat because: a status replaces only an earlier stage of its run, one effect is in flight per
run, and posting a status that the commit shows already changes nothing.

A forge that does not answer is asked again for as long as that lasts. Meanwhile the newest status takes
the place of those that were not posted, and no run waits for any of this.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import assert_never

from infra.ports.services import Forges
from infra.readmodel.estimates import Interval
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from schemas.effects import Failed, PostStatus, StatusPosted
from schemas.events import (
    CommitStatusDecided,
    CommitStatusPosted,
    PushExamined,
    RunFailed,
    RunFinished,
    RunRejected,
    RunStopped,
    TriggerQueued,
    TriggerRefused,
    TriggerSubmitted,
)
from schemas.ids import ConsumerName, StreamName, status_stream
from schemas.specs import CommitStatus, PushOrigin, StatusState

LONGEST = 140
"""Characters of a status: the most that GitHub accepts."""

StatusEvent = CommitStatusDecided | CommitStatusPosted
RunEnd = RunFinished | RunFailed | RunStopped | RunRejected
StatusSource = PushExamined | TriggerQueued | TriggerSubmitted | TriggerRefused | RunEnd
StatusMessage = StatusSource | StatusPosted | Failed


class Stage(IntEnum):
    """How far a run is. A status is replaced only by one of a later stage, in whatever order events
    arrive."""

    NONE = 0
    QUEUED = 1
    SUBMITTED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Statuses:
    """The statuses of one subject: the last one that was decided, and the number of the last one that
    was answered. One is in flight while `decided` is larger than `posted`."""

    stage: Stage = Stage.NONE
    status: CommitStatus | None = None
    decided: int = 0
    posted: int = 0


def evolve(state: Statuses, event: StatusEvent) -> Statuses:
    """Return the state after one event of a status stream."""
    match event:
        case CommitStatusDecided():
            stage = Stage(event.stage)
            return replace(state, stage=stage, status=event.status, decided=event.number)
        case CommitStatusPosted():
            return replace(state, posted=event.number)
        case _:
            assert_never(event)


def handle(state: Statuses, message: StatusMessage, meta: Meta) -> Decision:
    """Decide on the status that a commit is to show, and post the newest one when the last is
    answered."""
    match message:
        case StatusPosted(effect=effect):
            return _settle(state, effect, skipped=message.skipped)
        case Failed(effect=PostStatus() as effect):
            return _settle(state, effect, error=one_line(message.message))
        case Failed():
            return NOTHING
        case _:
            return _decide(state, message)


def _settle(
    state: Statuses, effect: PostStatus, *, skipped: bool = False, error: str | None = None
) -> Decision:
    if effect.number <= state.posted or state.status is None:
        return NOTHING
    posted = CommitStatusPosted(
        workspace=effect.status.workspace,
        subject=effect.subject,
        number=effect.number,
        skipped=skipped,
        error=error,
    )
    if state.decided == effect.number:
        return Decision(events=(posted,))
    newer = PostStatus(subject=effect.subject, number=state.decided, status=state.status)
    return Decision(events=(posted,), effects=(newer,))


def _decide(state: Statuses, message: StatusSource) -> Decision:
    found = status_of(message, state.status)
    if found is None or found[0] <= state.stage:
        return NOTHING
    stage, status = found
    number = state.decided + 1
    subject = _subject(message)
    decided = CommitStatusDecided(
        workspace=status.workspace,
        subject=subject,
        number=number,
        stage=int(stage),
        status=status,
    )
    if state.decided > state.posted:
        return Decision(events=(decided,))
    effect = PostStatus(subject=subject, number=number, status=status)
    return Decision(events=(decided,), effects=(effect,))


def status_of(
    message: StatusSource, last: CommitStatus | None
) -> tuple[Stage, CommitStatus] | None:
    """Return the stage and the status that a message means; None when it means none. `last` is the
    status before, which knows the name of the run."""
    match message:
        case PushExamined():
            return _wrong_push(message)
        case TriggerQueued():
            text = f"queued behind run {message.behind}"
            return Stage.QUEUED, _status(message.origin, "pending", text)
        case TriggerSubmitted():
            name = message.run_name
            text = "in progress"
            if message.origin.require_approval:
                text = f"waits for approval: headrace train approve {name}"
            return Stage.SUBMITTED, _status(message.origin, "pending", text, f"/runs/{name}")
        case TriggerRefused():
            return Stage.ENDED, _status(message.origin, "failure", message.message)
        case _:
            return _end(message, last)


def _end(message: RunEnd, last: CommitStatus | None) -> tuple[Stage, CommitStatus] | None:
    """Return the status of a run that ended; None when no push started it."""
    if message.origin is None:
        return None
    state, text = _result(message)
    link = last.link if last is not None and last.link else f"/runs/{message.run}"
    return Stage.ENDED, _status(message.origin, state, text, link)


def _result(message: RunEnd) -> tuple[StatusState, str]:
    match message:
        case RunFinished(held_out=(before, after)):
            of = message.held_out_intervals or (None, None)
            change = f"{_with_interval(before, of[0])} -> {_with_interval(after, of[1])}"
            return "success", f"held-out reward {change} in {message.step} steps"
        case RunFinished():
            reward = "" if message.reward is None else f", reward {message.reward:.2f}"
            return "success", f"finished in {message.step} steps{reward}"
        case RunStopped():
            return "error", f"stopped at step {message.step}"
        case RunFailed(kind="crash"):
            return "error", message.message
        case RunFailed() | RunRejected():
            return "failure", message.message
        case _:
            assert_never(message)


def _with_interval(reward: float, interval: Interval | None) -> str:
    """A reward, with its 95 % interval if it is known."""
    return f"{reward:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _wrong_push(message: PushExamined) -> tuple[Stage, CommitStatus] | None:
    if message.error is None:
        return None
    push = message.push
    status = CommitStatus(
        workspace=push.workspace,
        sha=push.after,
        context=f"headrace/{push.workspace_name}",
        state="failure",
        text=one_line(message.error),
    )
    return Stage.ENDED, status


def _status(
    origin: PushOrigin, state: StatusState, text: str, link: str | None = None
) -> CommitStatus:
    push = origin.push
    return CommitStatus(
        workspace=push.workspace,
        sha=push.after,
        context=origin.context,
        state=state,
        text=one_line(text),
        link=link,
    )


def one_line(text: str) -> str:
    """Return the first line of `text` that is not empty, printable, with at most LONGEST characters.
    Messages may come from user code."""
    lines = (" ".join(line.split()) for line in text[: 20 * LONGEST].splitlines())
    first = next((line for line in lines if line), "no reason is given")
    shown = "".join(c if c.isprintable() else "?" for c in first)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _subject(message: StatusSource) -> str:
    return message.push.id if isinstance(message, PushExamined) else message.run


def routes(message: StatusMessage) -> tuple[StreamName, ...]:
    """Return the stream of the statuses of a run, or of a push whose commit is wrong; none for a run
    that no push started."""
    match message:
        case StatusPosted() | Failed():
            return ()
        case PushExamined():
            return (status_stream(message.push.id),) if message.error is not None else ()
        case _:
            return (status_stream(message.run),) if message.origin is not None else ()


@dataclass(frozen=True, slots=True)
class StatusPorts:
    """The APIs of forges."""

    forges: Forges


async def perform(effect: PostStatus, ports: StatusPorts) -> StatusPosted:
    """Show the status on its commit. Raises Refused when the forge refuses it, and ForgeAway when the
    forge does not answer."""
    shown = await ports.forges.post(effect.status)
    return StatusPosted(effect, skipped=not shown)


CONSUMER: Consumer[Statuses, StatusEvent, StatusMessage, PostStatus, StatusPorts] = Consumer(
    name=ConsumerName("status"),
    category="status",
    reads=(
        PushExamined,
        TriggerQueued,
        TriggerSubmitted,
        TriggerRefused,
        RunFinished,
        RunFailed,
        RunStopped,
        RunRejected,
    ),
    emits=(CommitStatusDecided, CommitStatusPosted),
    effects=(PostStatus,),
    initial=Statuses(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=StatusPorts,
)
