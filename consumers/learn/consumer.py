"""Takes a run's optimizer steps.
Reads: RunStarted, BatchAssembled.
Emits: PolicyInitialized, PolicyUpdated, PolicyFailed, SampleRefuted.  Stream: policy.
Does: builds version 0, steps, stores what must last (lane: train).  Waits for: nothing.
Safe to repeat because: one TrainStep per step of a run; a version that exists already decides nothing.

A run assembles the batch of step s only once step s - 1 is settled, so each step starts
from the newest version of this stream. A batch with samples that do not come from the version that the
log names is refused (`consumers/learn/attested.py`), and the run assembles another. The hash of every
version enters the log. Its bytes are stored only while something needs them
(`consumers/learn/retention.py`): samplers, checkpoints, validations or recovery.
`consumers/learn/replay.py` rebuilds every other version.
"""

from dataclasses import dataclass, replace
from typing import assert_never

from consumers.learn.attested import refuted_samples, sampled_version, served_by_server
from consumers.learn.forking import fork_policy
from consumers.learn.replay import (
    HistoryPorts,
    build_step_batch,
    ensure_loaded,
    job_of,
    read_learned_rows,
)
from consumers.learn.retention import discardable, retain
from consumers.learn.state import PolicyState
from consumers.learn.versions import discarding, store_version
from consumers.stored_files import store_shared
from infra.spine.ports.clock import Clock
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.algorithms import samples_nothing
from schemas.effects import Failed, InitializePolicy, PolicyBuilt, StepRefused, TrainStep
from schemas.errors import FailureCategory
from schemas.events import (
    BatchAssembled,
    PolicyFailed,
    PolicyInitialized,
    PolicyUpdated,
    RunStarted,
    SampleRefuted,
)
from schemas.ids import ConsumerName, StreamName, policy_stream
from schemas.learner import LearnedRow, Learner, SamplesRefuted
from schemas.specs import StateRef, TrainSpec

SMALL_STATE_BYTES = 64 << 20
"""Below this size every version is stored whole, because writing it costs less than replaying a step."""

LARGE_STATE_INTERVAL = 10

PolicyEvent = PolicyInitialized | PolicyUpdated | PolicyFailed | SampleRefuted
PolicyMessage = RunStarted | BatchAssembled | PolicyBuilt | StepRefused | Failed


def evolve(state: PolicyState, event: PolicyEvent) -> PolicyState:
    """Return the state after one event of a policy stream."""
    match event:
        case PolicyInitialized(spec=spec, state=base):
            taken = event.fork.taken if event.fork else 0
            return PolicyState(spec=spec, base=base, taken=taken, interval=_interval(spec, base))
        case PolicyUpdated(state=base):
            return replace(retain(state, event), base=base, taken=state.taken + 1, refused=0)
        case SampleRefuted():
            return replace(state, refused=event.attempt)
        case PolicyFailed():
            return replace(state, failed=True)
        case _:
            assert_never(event)


def _interval(spec: TrainSpec, base: StateRef) -> int:
    """Return how many steps lie between versions that are stored whole."""
    if spec.config.advanced.state_interval is not None:
        return spec.config.advanced.state_interval
    size = sum(ref.size for ref in (base.weights, base.state) if ref is not None)
    return 1 if size < SMALL_STATE_BYTES else LARGE_STATE_INTERVAL


def handle(state: PolicyState, message: PolicyMessage, meta: Meta) -> Decision:
    """Build version 0 of a run that started, and take each step once."""
    if state.failed:
        return NOTHING
    match message:
        case RunStarted(spec=spec) if state.spec is None:
            return Decision(effects=(InitializePolicy(spec=spec, fork=message.fork),))
        case BatchAssembled():
            return _request_step(state, message, meta)
        case PolicyBuilt(effect=InitializePolicy(spec=spec)) if state.spec is None:
            initialized = PolicyInitialized(
                run=spec.run,
                spec=spec,
                state=message.state,
                versions=message.versions,
                files=message.files,
                weights_name=message.weights_name,
                metrics=message.metrics,
                fork=message.forked,
                work=meta.work,
            )
            return Decision(events=(initialized,))
        case PolicyBuilt(effect=TrainStep() as effect) if not _is_already_taken(state, effect.step):
            return Decision(events=(_policy_updated(message, effect, meta),))
        case StepRefused(effect=effect) if not _is_already_taken(state, effect.step):
            return Decision(
                events=refuted_samples(message) if effect.refused == state.refused else ()
            )
        case Failed(effect=InitializePolicy(spec=spec)) if state.spec is None:
            return Decision(events=(_policy_failed(spec, 0, message, meta),))
        case Failed(effect=TrainStep(spec=spec, step=step)) if not _is_already_taken(state, step):
            return Decision(events=(_policy_failed(spec, step, message, meta),))
        case _:
            return NOTHING


def _is_already_taken(state: PolicyState, step: int) -> bool:
    return state.base is not None and step <= state.base.step


def _request_step(state: PolicyState, message: BatchAssembled, meta: Meta) -> Decision:
    if state.spec is None or state.base is None:
        raise RuntimeError(f"step {message.step} of {message.run} is due before version 0 exists")
    spec, number = state.spec, message.step
    if _is_already_taken(state, number):
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
        retired=discardable(state, number),
        refused=state.refused,
        sampled=sampled_version(message, state.base) if spec.attests else None,
    )
    return Decision(effects=(step,))


def _is_validated(spec: TrainSpec, step: int) -> bool:
    """Whether the run validates this version. Validation samples with the version's weights."""
    every = spec.config.checkpoints.eval_interval
    return every is not None and step % every == 0


def _policy_updated(message: PolicyBuilt, effect: TrainStep, meta: Meta) -> PolicyUpdated:
    refused = {"attest/refused": float(effect.refused)} if effect.spec.attests else {}
    return PolicyUpdated(
        run=effect.spec.run,
        step=effect.step,
        state=message.state,
        batch=effect.batch,
        metrics=message.metrics | refused,
        plan=message.plan,
        versions=message.versions,
        pinned=effect.pinned or message.fork is not None,
        fork=message.fork,
        work=meta.work,
    )


def _policy_failed(spec: TrainSpec, step: int, message: Failed, meta: Meta) -> PolicyFailed:
    crashed = message.category == FailureCategory.CRASH
    text = f"{message.category}: {message.message}"
    return PolicyFailed(
        run=spec.run,
        step=step,
        kind="crash" if crashed else "error",
        message=excerpt(text),
        work=meta.work,
    )


def routes(message: PolicyMessage) -> tuple[StreamName, ...]:
    """Return the run's policy stream, on which all its versions are decided."""
    return (policy_stream(message.run),) if isinstance(message, RunStarted | BatchAssembled) else ()


@dataclass(frozen=True, slots=True)
class LearnPorts(HistoryPorts):
    """The learner, what its run has recorded, and a clock for its metrics."""

    learner: Learner
    clock: Clock


async def perform(
    effect: InitializePolicy | TrainStep, ports: LearnPorts
) -> PolicyBuilt | StepRefused:
    """Build version 0, or take a step. Returns the new version, or which samples were refuted. Raises
    Refused for a model or row that cannot be used, ReplayDiverged, CorruptData, TransientError."""
    match effect:
        case InitializePolicy():
            return await _initialize(effect, ports)
        case TrainStep():
            return await _train(effect, ports)
        case _:
            assert_never(effect)


async def _initialize(effect: InitializePolicy, ports: LearnPorts) -> PolicyBuilt:
    learner, run = ports.learner, effect.spec.run
    if effect.fork is not None:
        return await fork_policy(effect, effect.fork, learner, ports)
    held_out = await _read_held_out(ports, effect.spec, 0)
    result = await learner.initialize(job_of(effect.spec))
    scores = await _measure_held_out(learner, effect.spec, 0, held_out)
    state = await store_version(result.state, ports.artifacts, run, step=0)
    return PolicyBuilt(
        effect=effect,
        state=state,
        metrics=result.metrics | scores,
        versions=result.versions,
        files=await store_shared(result.files, ports.artifacts, run=run),
        weights_name=result.weights_name,
    )


async def _train(effect: TrainStep, ports: LearnPorts) -> PolicyBuilt | StepRefused:
    learner, spec = ports.learner, effect.spec
    assert effect.base is not None, effect.step  # noqa: S101 - a step follows a version
    began = ports.clock.elapsed_s()
    batch = await build_step_batch(
        ports, spec, number=effect.taken + 1, groups=effect.groups, rows=effect.rows
    )
    held_out = await _read_held_out(ports, spec, effect.step)
    fork = await ensure_loaded(learner, ports, spec, effect.base, taken=effect.taken)
    durable = effect.durable or fork is not None  # later steps are rebuilt from a divergence
    async with discarding(effect.retired, ports.artifacts):
        try:
            result = await learner.step(
                job_of(spec),
                replace(batch, attests=spec.attests, sampled=effect.sampled),
                export_state=durable,
                export_weights=durable or not samples_nothing(spec.config.advanced),
            )
        except SamplesRefuted as error:
            return StepRefused(effect, error.refutations, served_by_server(batch.groups))
        scores = await _measure_held_out(learner, spec, batch.step, held_out)
        learned = ports.clock.elapsed_s()
        state = await store_version(result.state, ports.artifacts, spec.run, step=effect.step)
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
        fork=fork,
    )


async def _read_held_out(ports: LearnPorts, spec: TrainSpec, step: int) -> tuple[LearnedRow, ...]:
    """Return the held-out rows that this version is measured on; none if it is not measured."""
    if spec.validation is None or not spec.is_scored(step):
        return ()
    return await read_learned_rows(ports, spec, spec.validation, range(spec.validation.num_rows))


async def _measure_held_out(
    learner: Learner, spec: TrainSpec, version: int, held_out: tuple[LearnedRow, ...]
) -> dict[str, float]:
    """Return how the learner's version does on held-out rows; nothing if it is not measured."""
    return await learner.evaluate(job_of(spec), version, held_out) if held_out else {}


CONSUMER: Consumer[
    PolicyState, PolicyEvent, PolicyMessage, InitializePolicy | TrainStep, LearnPorts
] = Consumer(
    name=ConsumerName("learn"),
    category="policy",
    reads=(RunStarted, BatchAssembled),
    emits=(PolicyInitialized, PolicyUpdated, PolicyFailed, SampleRefuted),
    effects=(InitializePolicy, TrainStep),
    initial=PolicyState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=LearnPorts,
    snapshots=PolicyState,
    fold_version=5,
)
