"""Events of verifications, which rebuild a run from its log."""

from typing import ClassVar

from pydantic import Field

from schemas.costs.work import Work
from schemas.events.event import RUN_TOPIC, Event, Gate
from schemas.ids import StreamName, verify_stream
from schemas.specs import Finding


class _VerificationEvent(Event):
    topic: ClassVar[str] = RUN_TOPIC
    verification: str
    run: str

    @property
    def stream(self) -> StreamName:
        return verify_stream(self.verification)

    @property
    def run_id(self) -> str:
        return self.verification


class VerificationRequested(_VerificationEvent):
    """A user asked to rebuild a run from its log and to compare every hash."""

    type: ClassVar[str] = "rl.verification.requested"


class VerificationCompleted(_VerificationEvent):
    """A verification ended. Without findings and without an `error`, every version and checkpoint was
    rebuilt and has the hash that the log holds. `error` means that the verification could not be
    carried out."""

    type: ClassVar[str] = "rl.verification.completed"
    gate: ClassVar[Gate | None] = "closed"
    findings: tuple[Finding, ...] = ()
    steps: int = 0
    checkpoints: int = 0
    artifacts: int = 0
    adapter_sha256: str | None = None
    forks: tuple[int, ...] = Field(default=(), exclude_if=lambda value: value == ())
    error: str | None = None
    work: Work | None = Field(default=None, exclude_if=lambda value: value is None)
