"""Events of deployments. All deployments of an installation share one stream, because its owner must see
all of them to decide whether there is room for another."""

from typing import ClassVar

from pydantic import Field

from schemas.deployments import ServedModel, deployment_id, deployment_key
from schemas.events.event import WORKSPACE_TOPIC, Event
from schemas.ids import StreamName, model_stream


class _ModelEvent(Event):
    """An event about the deployment `deployment`. `request` is the id of the request that it belongs to.
    `scope` is the workspace in which the name is unique, and empty for a deployment of no workspace. It
    is None where it is not known: in events of earlier releases, whose names were unique in the
    installation."""

    topic: ClassVar[str] = WORKSPACE_TOPIC
    deployment: str
    request: str
    scope: str | None = Field(default=None, exclude_if=lambda scope: scope is None)

    @property
    def stream(self) -> StreamName:
        return model_stream()

    @property
    def run_id(self) -> str:
        return deployment_id(deployment_key(self.deployment, self.scope))

    @property
    def name(self) -> str:
        return f"{self.type}/{self.request}"


class ModelDeployRequested(_ModelEvent):
    """A checkpoint is to be served under a name, by request of a user or at the end of a run that has
    `advanced.deploy`. A version that is served under this name stays until the new one is loaded."""

    type: ClassVar[str] = "rl.model.deploy-requested"
    served: ServedModel


class ModelDeployed(_ModelEvent):
    """The checkpoint is loaded, and new requests to its name get its answers. `number` counts the
    versions of all names, from 1."""

    type: ClassVar[str] = "rl.model.deployed"
    served: ServedModel
    number: int


class ModelDeployFailed(_ModelEvent):
    """The checkpoint cannot be served. What was served under the name before is still served."""

    type: ClassVar[str] = "rl.model.deploy-failed"
    message: str


class ModelDeploySkipped(_ModelEvent):
    """A run with `advanced.deploy` ended, and none of its checkpoints is better than what is served."""

    type: ClassVar[str] = "rl.model.deploy-skipped"
    run: str
    reason: str


class ModelUndeployRequested(_ModelEvent):
    """A user asked to end a deployment."""

    type: ClassVar[str] = "rl.model.undeploy-requested"


class ModelUndeployed(_ModelEvent):
    """The name is not served any more. Requests that were being answered are still answered."""

    type: ClassVar[str] = "rl.model.undeployed"
