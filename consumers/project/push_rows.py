"""Turns events about pushes into rows: deliveries, moves of refs, and the runs that triggers made."""

from infra.readmodel.rows import (
    ChangePush,
    ChangeTriggeredRun,
    ChangeWorkspace,
    PutDelivery,
    PutPush,
    PutTriggeredRun,
    Write,
)
from infra.spine.ports.event_log import Recorded
from schemas.events import (
    CommitStatusDecided,
    HookPinged,
    PushExamined,
    PushReceived,
    RefsCheckRequested,
    RefsListed,
    RefsMoved,
    TriggerFired,
    TriggerQueued,
    TriggerRefused,
    TriggerSkipped,
    TriggerSubmitted,
    WorkspaceConnected,
    WorkspaceDisconnected,
)


def push_rows(recorded: Recorded) -> tuple[Write, ...]:
    """Return the rows of an event about pushes; nothing for other events."""
    at = recorded.time
    match recorded.event:
        case WorkspaceConnected() as event:
            return (ChangeWorkspace(event.workspace, at, forge=event.forge),)
        case WorkspaceDisconnected() as event:
            return (ChangeWorkspace(event.workspace, at, forge="", refs_error=""),)
        case PushReceived() | HookPinged() | RefsCheckRequested():
            return (_delivery(recorded),)
        case RefsMoved() as event:
            return _moves(event, recorded)
        case RefsListed() as event:
            return (_listing(event, recorded),)
        case PushExamined() as event:
            return (ChangePush(event.push.id, reason=event.reason, error=event.error),)
        case (
            TriggerQueued()
            | TriggerSkipped()
            | TriggerFired()
            | TriggerSubmitted()
            | TriggerRefused()
        ):
            return _triggered_run(recorded)
        case CommitStatusDecided() as event:
            status = event.status
            change = ChangeTriggeredRun(
                event.subject, commit_state=status.state, commit_text=status.text
            )
            return (change,)
        case _:
            return ()


def _delivery(recorded: Recorded) -> PutDelivery:
    event, at, identity = recorded.event, recorded.time, str(recorded.id)
    match event:
        case PushReceived():
            return PutDelivery(
                workspace=event.workspace,
                event=identity,
                kind="push",
                at=at,
                forge=event.forge,
                delivery=event.delivery,
                ref=event.ref,
                before=event.before,
                after=event.after,
                forced=event.forced,
                pusher=event.pusher,
            )
        case HookPinged():
            return PutDelivery(event.workspace, identity, "ping", at, event.forge, event.delivery)
        case RefsCheckRequested():
            return PutDelivery(event.workspace, identity, event.reason, at)
        case _:
            raise AssertionError(f"{event.type} is not a delivery")


def _moves(event: RefsMoved, recorded: Recorded) -> tuple[Write, ...]:
    return tuple(
        PutPush(
            push=f"{event.workspace}.{move.number}",
            workspace=event.workspace,
            number=move.number,
            ref=move.ref,
            before=move.before,
            after=move.after,
            baseline=event.baseline,
            at=recorded.time,
        )
        for move in event.moves
    )


def _listing(event: RefsListed, recorded: Recorded) -> ChangeWorkspace:
    return ChangeWorkspace(
        event.workspace,
        recorded.time,
        refs_digest=event.digest,
        refs_error=event.error or "",
        refs_at=recorded.time,
        default_branch=event.default_branch,
    )


def _triggered_run(recorded: Recorded) -> tuple[Write, ...]:
    event = recorded.event
    match event:
        case TriggerQueued():
            outcome, detail, name = "queued", f"behind run {event.behind}", None
        case TriggerSkipped():
            outcome, detail, name = "skipped", event.reason, None
        case TriggerFired():
            outcome, detail, name = "fired", "", None
        case TriggerSubmitted():
            outcome, detail, name = "submitted", "", event.run_name
        case TriggerRefused():
            outcome, detail, name = "refused", event.message, None
        case _:
            raise AssertionError(f"{event.type} is not about the run of a trigger")
    push, match = event.origin.push, event.origin.match
    put = PutTriggeredRun(event.run, push.id, push.workspace, match.trigger, match.config, outcome)
    return (put, ChangeTriggeredRun(event.run, outcome, name, detail))
