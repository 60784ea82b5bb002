"""Turns events into rows of the cost ledger: at most one for each event, so that nothing counts twice.

An event of an earlier release says no device-seconds, but its tokens and its calls count.
"""

from collections.abc import Iterable

from infra.readmodel.rows import PutCost, Write
from infra.spine.ports.event_log import Recorded
from schemas.artifact_refs import ArtifactRef
from schemas.costs.work import Work
from schemas.events import (
    CheckpointFailed,
    CheckpointSaved,
    GroupGenerated,
    GroupGraded,
    GroupsSettled,
    PolicyFailed,
    PolicyInitialized,
    PolicyUpdated,
    RunArchived,
    SampleGenerated,
    VerificationCompleted,
)
from schemas.ids import Purpose
from schemas.sampling import JudgeUsage
from schemas.specs import GroupSpec, SampleEntry, StateRef

TRAINED = "train/tokens"
"""The metric of a step that counts the tokens that it read, those of prompts included."""


def cost_rows(recorded: Recorded) -> tuple[Write, ...]:
    """Return the row of an event that costs something, and the sums of a run that is archived; nothing
    for other events."""
    if isinstance(recorded.event, RunArchived):
        return _sums_of(recorded, recorded.event)
    put = _cost_of(recorded)
    if put is None:
        return ()
    is_free = put.device is None and not (
        put.sampled or put.trained or put.discarded or put.calls_usd or put.calls_tokens
    )
    return () if is_free and not put.stored_bytes else (put,)


def _cost_of(recorded: Recorded) -> PutCost | None:
    match recorded.event:
        case SampleGenerated(spec=spec, entry=entry) as event:
            refs = (*event.files, *_some(event.artifact))
            return _put_samples(recorded, spec, (entry,), event.work, sample=entry.index, refs=refs)
        case GroupGenerated(spec=spec, replayed=None) as event if not _has_samples(spec):
            return _put_samples(recorded, spec, event.entries, event.work, refs=event.parts)
        case GroupGraded(spec=spec) as event:
            judged = event.judged or JudgeUsage()
            return _put(
                recorded,
                spec.owner,
                spec.template.run,
                step=spec.group_key.step,
                work=event.work,
                calls_usd=judged.usd,
                calls_tokens=0 if judged.usd else judged.tokens,
                refs=(event.artifact, *_some(event.judgements)),
            )
        case GroupsSettled(purpose=Purpose.TRAIN) as event:
            dropped = [group for group in event.groups if group.dropped is not None]
            discarded = sum(e.completion_tokens for group in dropped for e in group.entries)
            return _put(recorded, event.owner, step=event.step, discarded=discarded)
        case PolicyInitialized() as event:
            return _put(recorded, event.run, step=0, work=event.work, refs=_parts_of(event.state))
        case PolicyUpdated() as event:
            trained = int(event.metrics.get(TRAINED, 0.0))
            refs = _parts_of(event.state) if event.pinned else ()
            return _put(
                recorded, event.run, step=event.step, work=event.work, trained=trained, refs=refs
            )
        case PolicyFailed() | CheckpointFailed() as event:
            return _put(recorded, event.run, step=event.step, work=event.work)
        case CheckpointSaved(spec=spec) as event:
            refs = (event.manifest,)
            return _put(recorded, spec.run, step=spec.step, work=event.work, refs=refs)
        case VerificationCompleted() as event:
            return _put(recorded, event.verification, event.run, work=event.work)
        case _:
            return None


def _sums_of(recorded: Recorded, event: RunArchived) -> tuple[Write, ...]:
    """The rows of an archived run, whose events have left the log."""
    return tuple(
        PutCost(
            event=f"{recorded.id}/{number}",
            run=event.run,
            owner=event.run,
            step=None,
            sample=None,
            stored_bytes=0,
            at=cost.last_at,
            **cost.model_dump(exclude={"last_at"}),
        )
        for number, cost in enumerate(event.costs)
    )


def _has_samples(spec: GroupSpec) -> bool:
    """Whether each sample of a group has an event of its own, which says what it cost."""
    rollout = spec.template.rollout
    return rollout is not None and rollout.makes_attempts


def _put_samples(
    recorded: Recorded,
    spec: GroupSpec,
    entries: tuple[SampleEntry, ...],
    work: Work | None,
    *,
    sample: int | None = None,
    refs: Iterable[ArtifactRef] = (),
) -> PutCost:
    is_called = spec.template.model.provider is not None
    unpriced = [entry for entry in entries if is_called and entry.usd is None]
    return _put(
        recorded,
        spec.owner,
        spec.template.run,
        step=spec.group_key.step,
        sample=spec.group if sample is None else f"{spec.group}.{sample}",
        work=work,
        sampled=sum(entry.completion_tokens for entry in entries),
        calls_usd=sum(entry.usd or 0.0 for entry in entries),
        calls_tokens=sum(entry.prompt_tokens + entry.completion_tokens for entry in unpriced),
        refs=refs,
    )


def _put(
    recorded: Recorded,
    run: str,
    owner: str | None = None,
    *,
    step: int | None = None,
    sample: str | None = None,
    work: Work | None = None,
    sampled: int = 0,
    trained: int = 0,
    discarded: int = 0,
    calls_usd: float = 0.0,
    calls_tokens: int = 0,
    refs: Iterable[ArtifactRef] = (),
) -> PutCost:
    return PutCost(
        event=str(recorded.id),
        run=run,
        owner=owner or run,
        step=step,
        sample=sample,
        effect=work.effect if work else None,
        device=work.device if work else None,
        device_s=work.device_s if work else 0.0,
        wasted_s=work.wasted_s if work else 0.0,
        sampled=sampled,
        trained=trained,
        discarded=discarded,
        calls_usd=calls_usd,
        calls_tokens=calls_tokens,
        stored_bytes=sum(ref.size for ref in refs),
        at=recorded.time,
    )


def _some(ref: ArtifactRef | None) -> tuple[ArtifactRef, ...]:
    return () if ref is None else (ref,)


def _parts_of(state: StateRef) -> tuple[ArtifactRef, ...]:
    return (*_some(state.weights), *_some(state.state))
