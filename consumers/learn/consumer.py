"""Takes a run's optimizer steps.
Reads: RunStarted, BatchAssembled.
Emits: PolicyInitialized, PolicyUpdated, PolicyFailed.  Stream: policy.
Does: builds version 0, steps, stores what must last (lane: train).  Waits for: nothing.
Safe to repeat because: one TrainStep per step of a run; a version that is known decides nothing.

A run assembles the batch of step s only once step s - 1 is settled, so the version to step from is
always the newest one here. Its hash always enters the log. Its bytes are stored where something needs
them: samplers (weights, RL), checkpoints and validations (`pinned`), and recovery (every `interval`
steps, of which the two newest are kept), and discarded once nothing does. `consumers/learn/replay.py`
rebuilds all others.
"""

from dataclasses import dataclass, replace
from typing import assert_never

from consumers.error_excerpt import excerpt
from consumers.learn.replay import conversations, hold, job_of, step_batch
from consumers.learn.versions import discarding, stored
from infra.ports.ports import Ports
from infra.runtime.consumer import NOTHING, Consumer, Decision, Meta
from schemas.effects import Failed, InitializePolicy, PolicyBuilt, TrainStep
from schemas.errors import FailureCategory
from schemas.events import (
    BatchAssembled,
    PolicyFailed,
    PolicyInitialized,
    PolicyUpdated,
    RunStarted,
)
from schemas.ids import ConsumerName, StreamName, policy_stream
from schemas.learner import Conversation, Learner
from schemas.sampling import ArtifactRef
from schemas.specs import StateRef, TrainSpec
from trainer import schedule

SMALL_STATE_BYTES = 64 << 20
"""Below this, every version is stored whole: writing it costs less than replaying a step."""

LARGE_STATE_INTERVAL = 10

LOOSE_KEPT = 2
"""Versions stored for recovery alone that are kept: the newest, and the one before in case it is the
newest that turns out to be unreadable."""

PolicyEvent = PolicyInitialized | PolicyUpdated | PolicyFailed
PolicyMessage = RunStarted | BatchAssembled | PolicyBuilt | Failed


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The newest version, how many steps led to it, and what may be discarded after it.

    Of versions that no checkpoint or validation needs, oldest first: `loose` are stored whole for
    recovery, `lent` have their weights stored, for samplers or recovery. `failed`: the learner gave up.
    """

    spec: TrainSpec | None = None
    base: StateRef | None = None
    taken: int = 0
    interval: int = 1
    loose: tuple[StateRef, ...] = ()
    lent: tuple[StateRef, ...] = ()
    failed: bool = False


def evolve(state: PolicyState, event: PolicyEvent) -> PolicyState:
    """Fold one event of a policy stream."""
    match event:
        case PolicyInitialized(spec=spec, state=base):
            return PolicyState(spec=spec, base=base, interval=_interval(spec, base))
        case PolicyUpdated(state=base):
            loose, lent = _loose(state, event.step), _lent(state, event.step)
            spare = not event.pinned
            if base.durable and spare:
                loose = (*loose, base)
            if state.base is not None and _same_weights(state.base, base):
                # One blob for both: from now on the newer version says how long it stays, unless it
                # stays for good.
                spare = spare and state.base in lent
                lent = tuple(version for version in lent if version != state.base)
            if base.weights and spare:
                lent = (*lent, base)
            return replace(state, base=base, taken=state.taken + 1, loose=loose, lent=lent)
        case PolicyFailed():
            return replace(state, failed=True)
        case _:
            assert_never(event)


def _loose(state: PolicyState, step: int) -> tuple[StateRef, ...]:
    """What stays loose once `step` is taken."""
    kept = state.loose[-LOOSE_KEPT:]
    return tuple(version for version in kept if not _has_aliases(state, version, step))


def _lent(state: PolicyState, step: int) -> tuple[StateRef, ...]:
    """What stays lent once `step` is taken."""
    gone = _returned(state, step)
    kept = [version for version in state.lent if version not in gone]
    return tuple(version for version in kept if not _has_aliases(state, version, step))


def _has_aliases(state: PolicyState, version: StateRef, step: int) -> bool:
    """Whether skipped steps before `step` are aliases of this version: it may be in the checkpoint or
    the validation of one of them, so it stays for good."""
    return version == state.base and version.step < step - 1


def _same_weights(a: StateRef, b: StateRef) -> bool:
    """Whether two versions' weights are the same bytes, and so the same artifact: a step without a
    gradient, or at a learning rate of zero, changes nothing."""
    return a.weights is not None and b.weights is not None and a.weights.uri == b.weights.uri


def _returned(state: PolicyState, step: int) -> tuple[StateRef, ...]:
    """Lent versions whose weights nobody needs once the batch of `step` is complete: no recovery, and no
    group that is not settled yet, for the oldest version that one of those pins is newer."""
    if state.spec is None or state.base is None:
        return ()
    pinned = state.base.step
    if not _is_sft(state.spec):
        pinned = schedule.pace_of(state.spec.config).pinned_version(step + 1)
    at_hand = [version.step for version in (*state.lent, state.base) if version.step <= pinned]
    oldest = max(at_hand, default=0)
    recovery = state.loose[-LOOSE_KEPT:]
    return tuple(
        version
        for version in state.lent
        if version.step < oldest and not any(_same_weights(version, kept) for kept in recovery)
    )


def _interval(spec: TrainSpec, base: StateRef) -> int:
    """How many steps lie between versions that are stored whole."""
    if spec.config.advanced.state_interval is not None:
        return spec.config.advanced.state_interval
    size = sum(ref.size for ref in (base.weights, base.state) if ref is not None)
    return 1 if size < SMALL_STATE_BYTES else LARGE_STATE_INTERVAL


def handle(state: PolicyState, message: PolicyMessage, meta: Meta) -> Decision:
    """Build version 0 of a run that started; take each step once."""
    if state.failed:
        return NOTHING
    match message:
        case RunStarted(spec=spec) if state.spec is None:
            return Decision(effects=(InitializePolicy(spec=spec),))
        case BatchAssembled():
            return _step(state, message, meta)
        case PolicyBuilt(effect=InitializePolicy(spec=spec)) if state.spec is None:
            initialized = PolicyInitialized(
                run=spec.run,
                spec=spec,
                state=message.state,
                versions=message.versions,
                files=message.files,
                weights_name=message.weights_name,
                metrics=message.metrics,
            )
            return Decision(events=(initialized,))
        case PolicyBuilt(effect=TrainStep() as effect) if not _known(state, effect.step):
            return Decision(events=(_updated(message, effect),))
        case Failed(effect=InitializePolicy(spec=spec)) if state.spec is None:
            return Decision(events=(_failed(spec, 0, message),))
        case Failed(effect=TrainStep(spec=spec, step=step)) if not _known(state, step):
            return Decision(events=(_failed(spec, step, message),))
        case _:
            return NOTHING


def _known(state: PolicyState, step: int) -> bool:
    return state.base is not None and step <= state.base.step


def _step(state: PolicyState, message: BatchAssembled, meta: Meta) -> Decision:
    if state.spec is None or state.base is None:
        raise RuntimeError(f"step {message.step} of {message.run} is due before version 0 exists")
    spec, number = state.spec, message.step
    if _known(state, number):
        return NOTHING
    pinned = message.durable or _is_validated(spec, number)
    step = TrainStep(
        spec=spec,
        step=number,
        batch=meta.event_id,
        base=state.base,
        taken=state.taken,
        groups=message.groups,
        rows=message.rows,
        durable=pinned or number % state.interval == 0,
        pinned=pinned,
        retired=_retired(state, number),
    )
    return Decision(effects=(step,))


def _is_validated(spec: TrainSpec, step: int) -> bool:
    """Whether the run validates this version: it samples with its weights then."""
    every = spec.config.checkpoints.eval_interval
    return every is not None and step % every == 0


def _retired(state: PolicyState, step: int) -> tuple[ArtifactRef, ...]:
    """What can be discarded of earlier versions while `step` is taken: of recovery's the state, of those
    that nobody samples with any more the weights."""
    states = [version.state for version in state.loose[:-LOOSE_KEPT]]
    weights = [version.weights for version in _returned(state, step)]
    return tuple(ref for ref in (*states, *weights) if ref is not None)


def _is_sft(spec: TrainSpec) -> bool:
    return spec.config.advanced.algorithm == "sft"


def _updated(message: PolicyBuilt, effect: TrainStep) -> PolicyUpdated:
    return PolicyUpdated(
        run=effect.spec.run,
        step=effect.step,
        state=message.state,
        batch=effect.batch,
        metrics=message.metrics,
        plan=message.plan,
        versions=message.versions,
        pinned=effect.pinned,
    )


def _failed(spec: TrainSpec, step: int, message: Failed) -> PolicyFailed:
    crashed = message.category == FailureCategory.CRASH
    text = f"{message.category}: {message.message}"
    return PolicyFailed(
        run=spec.run, step=step, kind="crash" if crashed else "error", message=excerpt(text)
    )


def routes(message: PolicyMessage) -> tuple[StreamName, ...]:
    """Everything about a run is decided on its one policy stream."""
    return (policy_stream(message.run),) if isinstance(message, RunStarted | BatchAssembled) else ()


async def perform(effect: InitializePolicy | TrainStep, ports: Ports) -> PolicyBuilt:
    """Build or step. Raises Refused (a model or row that cannot be used), ReplayDiverged,
    CorruptData, TransientError."""
    match effect:
        case InitializePolicy():
            return await _initialize(effect, ports)
        case TrainStep():
            return await _train(effect, ports)
        case _:
            assert_never(effect)


async def _initialize(effect: InitializePolicy, ports: Ports) -> PolicyBuilt:
    learner, run = ports.require("learner"), effect.spec.run
    held_out = await _held_out(ports, effect.spec, 0)
    result = await learner.initialize(job_of(effect.spec))
    scores = await _scored(learner, effect.spec, 0, held_out)
    files = {
        name: await ports.artifacts.put(data, run=run, blob=True)
        for name, data in result.files.items()
    }
    return PolicyBuilt(
        effect=effect,
        state=await stored(result.state, ports, run, step=0, weights=True),
        metrics=result.metrics | scores,
        versions=result.versions,
        files=files,
        weights_name=result.weights_name,
    )


async def _train(effect: TrainStep, ports: Ports) -> PolicyBuilt:
    learner, spec = ports.require("learner"), effect.spec
    assert effect.base is not None, effect.step  # noqa: S101 - a step follows a version
    began = ports.clock.elapsed_s()
    batch = await step_batch(
        ports, spec, number=effect.taken + 1, groups=effect.groups, rows=effect.rows
    )
    held_out = await _held_out(ports, spec, effect.step)
    await hold(learner, ports, spec, effect.base, taken=effect.taken)
    async with discarding(effect.retired, ports):
        result = await learner.step(job_of(spec), batch, export_state=effect.durable)
        scores = await _scored(learner, spec, batch.step, held_out)
        learned = ports.clock.elapsed_s()
        weights = effect.durable or not _is_sft(spec)
        state = await stored(result.state, ports, spec.run, step=effect.step, weights=weights)
    times = {
        "time/learn_s": learned - began,
        "time/publish_s": ports.clock.elapsed_s() - learned,
    }
    return PolicyBuilt(
        effect=effect,
        state=state,
        metrics=result.metrics | scores | times,
        plan=result.plan,
        versions=result.versions,
    )


async def _held_out(ports: Ports, spec: TrainSpec, step: int) -> tuple[Conversation, ...]:
    """What this version is measured on; nothing where it is not."""
    if spec.validation is None or not spec.is_scored(step):
        return ()
    return await conversations(ports, spec.validation, range(spec.validation.num_rows))


async def _scored(
    learner: Learner, spec: TrainSpec, version: int, held_out: tuple[Conversation, ...]
) -> dict[str, float]:
    """The held-out loss of the learner's version, if it is to be measured."""
    return await learner.evaluate(job_of(spec), version, held_out) if held_out else {}


CONSUMER: Consumer[PolicyState, PolicyEvent, PolicyMessage, InitializePolicy | TrainStep] = (
    Consumer(
        name=ConsumerName("learn"),
        category="policy",
        reads=(RunStarted, BatchAssembled),
        emits=(PolicyInitialized, PolicyUpdated, PolicyFailed),
        effects=(InitializePolicy, TrainStep),
        initial=PolicyState(),
        evolve=evolve,
        handle=handle,
        routes=routes,
        perform=perform,
        snapshots=PolicyState,
        fold_version=3,
    )
)
