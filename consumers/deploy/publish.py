"""Pushes checkpoints to a model hub.
Reads: HubPushRequested, HubPushCancelRequested.  Emits: HubPushed, HubPushFailed.  Stream: hub.
Does: prepares the files of a checkpoint and uploads them as one commit (lane: export).
Waits for: nothing.
Safe to repeat because: the commit names its push, and is looked for before and after each attempt.

A hub that does not answer, or limits the rate, is asked again for as long as that lasts, or until the
push is cancelled. Files that it has already are not uploaded again.
"""

from dataclasses import dataclass
from typing import assert_never

from consumers.deploy.uploading import upload
from consumers.error_excerpt import excerpt
from infra.ports.ports import Ports
from infra.runtime.consumer import NOTHING, Consumer, Decision, Meta
from schemas.effects import CheckpointUploaded, Failed, PushCheckpoint
from schemas.events import HubPushCancelRequested, HubPushed, HubPushFailed, HubPushRequested
from schemas.ids import ConsumerName, StreamName, hub_stream

HubRequest = HubPushRequested | HubPushCancelRequested
HubEvent = HubRequest | HubPushed | HubPushFailed
HubMessage = HubRequest | CheckpointUploaded | Failed

CANCELLED = "the push was cancelled"


@dataclass(frozen=True, slots=True)
class HubPushState:
    """Whether the push has ended."""

    is_ended: bool = False


def evolve(state: HubPushState, event: HubEvent) -> HubPushState:
    """Return the state after one event of a push."""
    match event:
        case HubPushRequested() | HubPushCancelRequested():
            return state
        case HubPushed() | HubPushFailed():
            return HubPushState(is_ended=True)
        case _:
            assert_never(event)


def handle(state: HubPushState, message: HubMessage, meta: Meta) -> Decision:
    """Upload the checkpoint once, or record once why the hub does not have it."""
    if state.is_ended:
        return NOTHING
    match message:
        case HubPushRequested(push=push):
            return Decision(effects=(PushCheckpoint(push=push),))
        case HubPushCancelRequested(push=push):
            # Closes the push, so its effect is neither performed any longer nor claimed again.
            return Decision(events=(HubPushFailed(push=push, message=CANCELLED),))
        case CheckpointUploaded(effect=effect):
            done = HubPushed(push=effect.push, url=message.url, revision=message.revision)
            return Decision(events=(done,))
        case Failed(effect=PushCheckpoint(push=push)):
            failed = HubPushFailed(push=push, message=excerpt(message.message))
            return Decision(events=(failed,))
        case _:
            return NOTHING


def routes(message: HubMessage) -> tuple[StreamName, ...]:
    """Each push has a stream."""
    return (hub_stream(message.push.push),) if isinstance(message, HubRequest) else ()


async def perform(effect: PushCheckpoint, ports: Ports) -> CheckpointUploaded:
    """Upload the checkpoint. Raises Refused with the hub's words, and HubAway when the hub does not
    answer."""
    found = await upload(effect.push, ports)
    return CheckpointUploaded(effect, url=found.url, revision=found.revision)


CONSUMER: Consumer[HubPushState, HubEvent, HubMessage, PushCheckpoint] = Consumer(
    name=ConsumerName("publish"),
    category="hub",
    reads=(HubPushRequested, HubPushCancelRequested),
    emits=(HubPushed, HubPushFailed),
    effects=(PushCheckpoint,),
    initial=HubPushState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
)
