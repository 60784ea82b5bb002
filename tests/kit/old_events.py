"""Events as earlier releases of Headrace wrote them, under the names that they had then."""

from typing import ClassVar

from schemas.deployments import HubUpload
from schemas.events import WORKSPACE_TOPIC, Event, Gate
from schemas.events.workspaces import BaseWorkspaceEvent
from schemas.ids import StreamName, delivery_stream, hub_stream
from schemas.specs import CommitSpec


class OldRepositoryPushed(BaseWorkspaceEvent):
    """The type of CommitRequested before."""

    type: ClassVar[str] = "rl.workspace.pushed"
    workspace_name: str
    commit: CommitSpec
    requester: StreamName | None = None


class OldWorkspaceConnected(BaseWorkspaceEvent):
    """Version 1 called the kind of forge a provider."""

    type: ClassVar[str] = "rl.workspace.connected"
    provider: str
    can_post: bool = False


class _OldDelivery(BaseWorkspaceEvent):
    provider: str
    delivery: str

    @property
    def stream(self) -> StreamName:
        return delivery_stream(self.workspace)


class OldHookPinged(_OldDelivery):
    type: ClassVar[str] = "rl.workspace.hook-pinged"


class OldPushReceived(_OldDelivery):
    type: ClassVar[str] = "rl.workspace.push-received"
    ref: str
    before: str | None
    after: str | None


class _OldHubPush(Event):
    """Uploads to a model hub were called pushes, in the events and in their payloads."""

    topic: ClassVar[str] = WORKSPACE_TOPIC
    push: dict[str, object]

    @property
    def stream(self) -> StreamName:
        return hub_stream(self.run_id)

    @property
    def run_id(self) -> str:
        return str(self.push["push"])


class OldHubPushRequested(_OldHubPush):
    type: ClassVar[str] = "rl.hub-push.requested"


class OldHubPushCancelRequested(_OldHubPush):
    type: ClassVar[str] = "rl.hub-push.cancel-requested"


class OldHubPushed(_OldHubPush):
    type: ClassVar[str] = "rl.hub-push.pushed"
    gate: ClassVar[Gate | None] = "closed"
    url: str
    revision: str


def old_push(upload: HubUpload) -> dict[str, object]:
    """An upload as earlier releases wrote it."""
    fields = upload.model_dump()
    return {"push": fields.pop("upload"), **fields}
