"""Verifications, in which a worker of the lane `train` rebuilds a run from its log. This module requests
them, and finds them in the log itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from infra.ports.actor import is_confined
from infra.spine.ports.event_log import EventStore
from producers.core.lookup import Lookup
from schemas.errors import NotFound
from schemas.events import Event, VerificationCompleted, VerificationRequested
from schemas.ids import short_id, verify_stream
from schemas.specs import Finding

Status = Literal["running", "verified", "differs", "failed"]


@dataclass(frozen=True, slots=True)
class Verification:
    """The state of a verification. `verified` means that it ended and nothing disagreed."""

    id: str
    run: str
    status: Status
    steps: int = 0
    checkpoints: int = 0
    artifacts: int = 0
    adapter_sha256: str | None = None
    forks: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: str | None = None


class Verifications:
    """Requests verifications and finds them."""

    def __init__(self, log: EventStore, lookup: Lookup) -> None:
        self._log = log
        self._lookup = lookup

    async def request(self, ref: str, *, cause: UUID) -> Verification:
        """Request the verification of a run. The same cause gives the same verification. Raises
        NotFound, and Conflict when the run is archived."""
        run = (await self._lookup.whole_run(ref)).run
        identity = short_id("verification", str(cause))
        requested = VerificationRequested(verification=identity, run=run)
        await self._log.append([requested], cause=cause)
        return await self.find_verification(identity)

    async def find_verification(self, identity: str) -> Verification:
        """The verification with this id. Raises NotFound."""
        stream = verify_stream(identity)
        events = [r.event for r in (await self._log.load({stream: 0}))[stream]]
        if not await self._may_see(events):
            events = []
        for event in reversed(events):
            match event:
                case VerificationCompleted():
                    return _from_completed(event)
                case VerificationRequested(run=run):
                    return Verification(identity, run, "running")
        raise NotFound(
            f"there is no verification {identity!r}; `headrace train verify RUN` starts one"
        )

    async def _may_see(self, events: Sequence[Event]) -> bool:
        """Whether this task may see the run that is verified."""
        if not is_confined():
            return True
        try:
            for event in events:
                if isinstance(event, VerificationRequested):
                    await self._lookup.run(event.run)
        except NotFound:
            return False
        return True


def _from_completed(event: VerificationCompleted) -> Verification:
    status: Status = "differs" if event.findings else "verified"
    return Verification(
        id=event.verification,
        run=event.run,
        status="failed" if event.error else status,
        steps=event.steps,
        checkpoints=event.checkpoints,
        artifacts=event.artifacts,
        adapter_sha256=event.adapter_sha256,
        forks=event.forks,
        findings=event.findings,
        error=event.error,
    )
