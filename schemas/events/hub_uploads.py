"""Events of uploads of checkpoints to a model hub. Earlier releases called them pushes."""

from typing import ClassVar

from schemas.deployments import HubUpload
from schemas.events.event import WORKSPACE_TOPIC, Event, Gate
from schemas.ids import StreamName, hub_stream


class _HubUploadEvent(Event):
    """An event about the upload `upload.upload`. It belongs to the upload and not to the run, so that
    the checkpoint of a closed run can be uploaded."""

    version: ClassVar[int] = 2
    topic: ClassVar[str] = WORKSPACE_TOPIC
    upload: HubUpload

    @property
    def stream(self) -> StreamName:
        return hub_stream(self.upload.upload)

    @property
    def run_id(self) -> str:
        return self.upload.upload


class HubUploadRequested(_HubUploadEvent):
    """A user asked to upload a checkpoint to a model hub."""

    type: ClassVar[str] = "rl.hub-upload.requested"
    old_type: ClassVar[str | None] = "rl.hub-push.requested"


class HubUploadCancelRequested(_HubUploadEvent):
    """A user asked to give up an upload that has not ended."""

    type: ClassVar[str] = "rl.hub-upload.cancel-requested"
    old_type: ClassVar[str | None] = "rl.hub-push.cancel-requested"


class HubUploaded(_HubUploadEvent):
    """The checkpoint is on the hub: one commit, `revision`, of the repository at `url`."""

    type: ClassVar[str] = "rl.hub-upload.uploaded"
    old_type: ClassVar[str | None] = "rl.hub-push.pushed"
    gate: ClassVar[Gate | None] = "closed"
    url: str
    revision: str


class HubUploadFailed(_HubUploadEvent):
    """The hub refused the checkpoint, it could not be prepared, or the upload was cancelled. `message`
    has the hub's words and what to do. The repository has no new commit, except one that was made while
    the upload was cancelled."""

    type: ClassVar[str] = "rl.hub-upload.failed"
    old_type: ClassVar[str | None] = "rl.hub-push.failed"
    gate: ClassVar[Gate | None] = "closed"
    message: str
