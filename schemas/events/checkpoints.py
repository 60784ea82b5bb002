"""Events of checkpoints."""

from typing import ClassVar

from pydantic import Field

from schemas.artifact_refs import ArtifactRef, Sha256
from schemas.costs.work import Spent, Work
from schemas.events.event import RUN_TOPIC, Event
from schemas.events.runs import BaseRunEvent, BaseStepEvent
from schemas.ids import StreamName, checkpoint_stream
from schemas.specs import CheckpointSpec


def _is_none(value: object) -> bool:
    return value is None


class CheckpointRequested(BaseRunEvent):
    """The run asks for the checkpoint of a settled step: at the configured interval, at a stop, or at
    the end."""

    type: ClassVar[str] = "rl.checkpoint.requested"
    spec: CheckpointSpec
    reward: float | None = None

    @property
    def name(self) -> str:
        return f"{self.type}/{self.spec.step}"


class CheckpointSaved(Event):
    """A checkpoint's manifest is written. Readers can verify every byte of the checkpoint with it."""

    type: ClassVar[str] = "rl.checkpoint.saved"
    topic: ClassVar[str] = RUN_TOPIC
    spec: CheckpointSpec
    manifest: ArtifactRef
    reward: float | None = None
    work: Work | None = Field(default=None, exclude_if=_is_none)

    @property
    def stream(self) -> StreamName:
        return checkpoint_stream(self.spec.run)

    @property
    def run_id(self) -> str:
        return self.spec.run

    @property
    def adapter_sha256(self) -> str:
        """The SHA-256 of the file of the weights, as users see it. Equal weights have equal ones, also
        in runs of other rules."""
        state = self.spec.state
        return state.weights_sha256 if state.weights is None else state.weights.sha256


class CheckpointFailed(Event):
    """A checkpoint could not be stored. The run fails and names its last good checkpoint."""

    type: ClassVar[str] = "rl.checkpoint.failed"
    topic: ClassVar[str] = RUN_TOPIC
    run: str
    step: int
    message: str
    work: Work | None = Field(default=None, exclude_if=_is_none)

    @property
    def stream(self) -> StreamName:
        return checkpoint_stream(self.run)

    @property
    def run_id(self) -> str:
        return self.run


class CheckpointSettled(BaseStepEvent):
    """The run has processed a saved checkpoint. `spent` is what saving it took of devices."""

    type: ClassVar[str] = "rl.checkpoint.settled"
    manifest_sha256: Sha256
    spent: Spent = Field(default={}, exclude_if=lambda value: value == {})
