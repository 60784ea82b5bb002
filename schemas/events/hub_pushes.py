"""Events of pushes, which upload a checkpoint to a model hub."""

from typing import ClassVar

from schemas.deployments import HubPush
from schemas.events.event import WORKSPACE_TOPIC, Event, Gate
from schemas.ids import StreamName, hub_stream


class _HubPushEvent(Event):
    """An event about the push `push.push`. It belongs to the push and not to the run, so that the
    checkpoint of a closed run can be pushed."""

    topic: ClassVar[str] = WORKSPACE_TOPIC
    push: HubPush

    @property
    def stream(self) -> StreamName:
        return hub_stream(self.push.push)

    @property
    def run_id(self) -> str:
        return self.push.push


class HubPushRequested(_HubPushEvent):
    """A user asked to upload a checkpoint to a model hub."""

    type: ClassVar[str] = "rl.hub-push.requested"


class HubPushCancelRequested(_HubPushEvent):
    """A user asked to give up a push that has not ended."""

    type: ClassVar[str] = "rl.hub-push.cancel-requested"


class HubPushed(_HubPushEvent):
    """The checkpoint is on the hub: one commit, `revision`, of the repository at `url`."""

    type: ClassVar[str] = "rl.hub-push.pushed"
    gate: ClassVar[Gate | None] = "closed"
    url: str
    revision: str


class HubPushFailed(_HubPushEvent):
    """The hub refused the checkpoint, it could not be prepared, or the push was cancelled. `message` has
    the hub's words and what to do. The repository has no new commit, except one that was made while the
    push was cancelled."""

    type: ClassVar[str] = "rl.hub-push.failed"
    gate: ClassVar[Gate | None] = "closed"
    message: str
