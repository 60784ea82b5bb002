"""Uploads checkpoints to a model hub.
Reads: HubUploadRequested, HubUploadCancelRequested.  Emits: HubUploaded, HubUploadFailed.  Stream: hub.
Does: prepares the files of a checkpoint and uploads them as one commit (lane: export).
Waits for: nothing.
Safe to repeat because: the commit names its upload, and is looked for before and after each attempt.

A hub that does not answer, or limits the rate, is asked again for as long as that lasts, or until the
upload is cancelled. Files that it has already are not uploaded again.
"""

from dataclasses import dataclass
from typing import assert_never

from consumers.deploy.uploading import UploadPorts, upload_checkpoint
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.effects import CheckpointUploaded, Failed, UploadCheckpoint
from schemas.events import (
    HubUploadCancelRequested,
    HubUploaded,
    HubUploadFailed,
    HubUploadRequested,
)
from schemas.ids import ConsumerName, StreamName, hub_stream

HubRequest = HubUploadRequested | HubUploadCancelRequested
HubEvent = HubRequest | HubUploaded | HubUploadFailed
HubMessage = HubRequest | CheckpointUploaded | Failed

CANCELLED = "the upload was cancelled"


@dataclass(frozen=True, slots=True)
class HubUploadState:
    """Whether the upload has ended."""

    is_ended: bool = False


def evolve(state: HubUploadState, event: HubEvent) -> HubUploadState:
    """Return the state after one event of an upload."""
    match event:
        case HubUploadRequested() | HubUploadCancelRequested():
            return state
        case HubUploaded() | HubUploadFailed():
            return HubUploadState(is_ended=True)
        case _:
            assert_never(event)


def handle(state: HubUploadState, message: HubMessage, meta: Meta) -> Decision:
    """Upload the checkpoint once, or record once why the hub does not have it."""
    if state.is_ended:
        return NOTHING
    match message:
        case HubUploadRequested(upload=upload):
            return Decision(effects=(UploadCheckpoint(upload=upload),))
        case HubUploadCancelRequested(upload=upload):
            # Closes the upload, so its effect is neither performed any longer nor claimed again.
            return Decision(events=(HubUploadFailed(upload=upload, message=CANCELLED),))
        case CheckpointUploaded(effect=effect):
            done = HubUploaded(upload=effect.upload, url=message.url, revision=message.revision)
            return Decision(events=(done,))
        case Failed(effect=UploadCheckpoint(upload=upload)):
            failed = HubUploadFailed(upload=upload, message=excerpt(message.message))
            return Decision(events=(failed,))
        case _:
            return NOTHING


def routes(message: HubMessage) -> tuple[StreamName, ...]:
    """Each upload has a stream."""
    return (hub_stream(message.upload.upload),) if isinstance(message, HubRequest) else ()


async def perform(effect: UploadCheckpoint, ports: UploadPorts) -> CheckpointUploaded:
    """Upload the checkpoint. Raises Refused with the hub's words, and HubAway when the hub does not
    answer."""
    found = await upload_checkpoint(effect.upload, ports)
    return CheckpointUploaded(effect, url=found.url, revision=found.revision)


CONSUMER: Consumer[HubUploadState, HubEvent, HubMessage, UploadCheckpoint, UploadPorts] = Consumer(
    name=ConsumerName("publish"),
    category="hub",
    reads=(HubUploadRequested, HubUploadCancelRequested),
    emits=(HubUploaded, HubUploadFailed),
    effects=(UploadCheckpoint,),
    initial=HubUploadState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=UploadPorts,
)
