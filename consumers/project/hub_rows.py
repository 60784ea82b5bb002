"""Turns events about pushes to a model hub into rows."""

from infra.ports.event_log import Recorded
from infra.readmodel.rows import ChangeHubPush, PutHubPush, Write
from schemas.events import HubPushed, HubPushFailed, HubPushRequested


def hub_rows(recorded: Recorded) -> tuple[Write, ...]:
    """Return the row of a push and its changes; nothing for other events."""
    event, at = recorded.event, recorded.time
    match event:
        case HubPushRequested(push=push):
            row = PutHubPush(
                push=push.push,
                run=push.run,
                step=push.step,
                repository=push.repository,
                form=push.form,
                visibility="private" if push.private else "public",
                requested_by=recorded.actor,
                created_at=at,
            )
            return (row,)
        case HubPushed(push=push, url=url, revision=revision):
            done = ChangeHubPush(push.push, at, status="pushed", url=url, revision=revision)
            return (done,)
        case HubPushFailed(push=push, message=message):
            return (ChangeHubPush(push.push, at, status="failed", error=message),)
        case _:
            return ()
