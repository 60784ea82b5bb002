"""Verifies runs against their own log.
Reads: VerificationRequested.  Emits: VerificationCompleted.  Stream: verify.
Does: rebuilds every version and compares every byte (lane: train).  Waits for: nothing.
Safe to repeat because: it only reads, and a verification that is answered decides nothing.

`consumers/verify/audit.py` does the comparison. A verification has its own id, so it can be performed
while its run continues, or long after the run's gate has closed.
"""

from dataclasses import dataclass
from typing import assert_never

from consumers.verify.audit import AuditPorts, audit
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.effects import Failed, RunAudited, VerifyRun
from schemas.events import VerificationCompleted, VerificationRequested
from schemas.ids import ConsumerName, StreamName, verify_stream

VerifyEvent = VerificationRequested | VerificationCompleted
VerifyMessage = VerificationRequested | RunAudited | Failed


@dataclass(frozen=True, slots=True)
class VerifyState:
    """Whether the verification is answered."""

    answered: bool = False


def evolve(state: VerifyState, event: VerifyEvent) -> VerifyState:
    """Return the state after one event of a verification's stream."""
    match event:
        case VerificationRequested():
            return state
        case VerificationCompleted():
            return VerifyState(answered=True)
        case _:
            assert_never(event)


def handle(state: VerifyState, message: VerifyMessage, meta: Meta) -> Decision:
    """Request each verification once, and record its answer once."""
    if state.answered:
        return NOTHING
    match message:
        case VerificationRequested():
            effect = VerifyRun(verification=message.verification, run=message.run)
            return Decision(effects=(effect,))
        case RunAudited(effect=effect):
            completed = VerificationCompleted(
                verification=effect.verification,
                run=effect.run,
                findings=message.findings,
                steps=message.steps,
                checkpoints=message.checkpoints,
                artifacts=message.artifacts,
                adapter_sha256=message.adapter_sha256,
                forks=message.forks,
                work=meta.work,
            )
            return Decision(events=(completed,))
        case Failed(effect=VerifyRun() as effect):
            completed = VerificationCompleted(
                verification=effect.verification,
                run=effect.run,
                error=excerpt(f"{message.category}: {message.message}"),
                work=meta.work,
            )
            return Decision(events=(completed,))
        case _:
            return NOTHING


def routes(message: VerifyMessage) -> tuple[StreamName, ...]:
    """Return the stream of the verification."""
    if isinstance(message, VerificationRequested):
        return (verify_stream(message.verification),)
    return ()


async def perform(effect: VerifyRun, ports: AuditPorts) -> RunAudited:
    """Audit the run and return the report. Raises Refused when its model cannot be loaded any more, and
    TransientError."""
    report = await audit(ports, effect.run, alias=effect.verification)
    return RunAudited(
        effect=effect,
        findings=tuple(report.findings),
        steps=report.steps,
        checkpoints=report.checkpoints,
        artifacts=report.artifacts,
        adapter_sha256=report.adapter_sha256,
        forks=tuple(report.forks),
    )


CONSUMER: Consumer[VerifyState, VerifyEvent, VerifyMessage, VerifyRun, AuditPorts] = Consumer(
    name=ConsumerName("verify"),
    category="verify",
    reads=(VerificationRequested,),
    emits=(VerificationCompleted,),
    effects=(VerifyRun,),
    initial=VerifyState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=AuditPorts,
)
