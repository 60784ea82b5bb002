"""Orchestrates a run: decides which groups, which batch and which checkpoint come next.
Reads: RunRequested, RunApproved, WorkspaceSynced, WorkspaceRejected, PolicyInitialized, PolicyFailed,
GroupGraded, SampleRefuted, PolicyUpdated, CheckpointSaved, CheckpointFailed, EvaluationCompleted,
RunPauseRequested, RunResumeRequested, RunStopRequested, TriggerFired.
Emits: RunRejected, RunStarted, PoolsDecided, GroupsRequested, GroupsSettled, BatchAssembled,
StepSkipped, StepSettled, RunWarned, CheckpointRequested, CheckpointSettled, EvaluationRequested,
EvaluationSettled, BudgetExhausted, RunPaused, RunResumed, RunStopRequested, RunStopped, RunFailed,
RunFinished.
Stream: run.
Does: nothing itself; it only decides.  Waits for: the facts above, never for a time.
Safe to repeat because: each fact is first re-recorded in the run's own stream, and what follows from the
state alone (`consumers/run/rules.py`) is decided once."""

from collections.abc import Mapping
from typing import Never, get_args

from consumers.run.health import is_unhealthy, unhealthy_step_message
from consumers.run.refuted import request_again
from consumers.run.rules import follow
from consumers.run.settle import settle
from consumers.run.start import start
from consumers.run.state import RunEvent, RunState, evolve
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta, Prefix
from schemas.algorithms import filters_groups
from schemas.costs.work import spent_by
from schemas.events import (
    BatchAssembled,
    BudgetExhausted,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSaved,
    CheckpointSettled,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationSettled,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    PolicyFailed,
    PolicyInitialized,
    PolicyUpdated,
    PoolsDecided,
    RunApproved,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunRejected,
    RunRequested,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    RunWarned,
    SampleRefuted,
    StepSettled,
    StepSkipped,
    TriggerFired,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import ConsumerName, Purpose, StreamName, run_stream
from schemas.specs import part_weights

RunMessage = (
    RunRequested
    | RunApproved
    | WorkspaceSynced
    | WorkspaceRejected
    | PolicyInitialized
    | PolicyFailed
    | GroupGraded
    | SampleRefuted
    | PolicyUpdated
    | CheckpointSaved
    | CheckpointFailed
    | EvaluationCompleted
    | RunPauseRequested
    | RunResumeRequested
    | RunStopRequested
    | TriggerFired
)


def routes(message: RunMessage) -> tuple[StreamName, ...]:
    """Return the stream of the run that a message is about; none if it is about something else."""
    match message:
        case TriggerFired():
            return tuple(run_stream(run) for run in message.supersedes)
        case WorkspaceSynced() | WorkspaceRejected():
            requester = message.requester
            return (requester,) if requester and requester.startswith("run-") else ()
        case GroupGraded():
            training = message.spec.purpose == Purpose.TRAIN
            return (run_stream(message.spec.owner),) if training else ()
        case CheckpointSaved():
            return (run_stream(message.spec.run),)
        case EvaluationCompleted():
            return (run_stream(message.run),) if message.run else ()
        case _:
            return (run_stream(message.run),)


def handle(state: RunState, message: RunMessage, meta: Meta) -> Decision:
    """Record the message as a fact, then decide what follows from the new state."""
    if state.ended or state.request is None:
        return NOTHING
    recorded = record(state, message, meta)
    for event in recorded:
        state = evolve(state, event)
    events = (*recorded, *follow(state))
    return Decision(events=tuple(_with_origin(event, state.request) for event in events))


def _with_origin(event: RunEvent, request: RunRequested | None) -> RunEvent:
    """Return the event, and with the end of a run the push that started it. Other consumers learn from
    it which push has ended."""
    if request is None or request.origin is None or not isinstance(event, RUN_ENDS):
        return event
    return event.model_copy(update={"origin": request.origin})


def record(state: RunState, message: RunMessage, meta: Meta) -> tuple[RunEvent, ...]:
    """Return the message as facts of the run's own stream; none if the run has recorded it already."""
    match message:
        case RunRequested() | RunApproved() | WorkspaceSynced() | WorkspaceRejected():
            return start(state, message)
        case PolicyInitialized():
            return _settle_start(state, message, meta)
        case PolicyFailed():
            run = message.run
            return (RunFailed(run=run, kind=message.kind, message=_failure_text(message)),)
        case GroupGraded():
            return _settle_group(state, message)
        case SampleRefuted():
            return request_again(state, message)
        case PolicyUpdated():
            return _settle_step(state, message, meta)
        case CheckpointSaved():
            return _settle_checkpoint(state, message)
        case CheckpointFailed():
            return (_fail_checkpoint(state, message),)
        case EvaluationCompleted():
            return _settle_evaluation(state, message)
        case RunPauseRequested() | RunResumeRequested() | RunStopRequested():
            return ()
        case TriggerFired():
            return (
                ()
                if state.stop_wanted or state.request is None
                else _stop_superseded(state.request)
            )


def _stop_superseded(request: RunRequested) -> tuple[RunEvent, ...]:
    return (RunStopRequested(run=request.run),)


def _settle_start(state: RunState, message: PolicyInitialized, meta: Meta) -> tuple[RunEvent, ...]:
    if state.settled >= 0:
        return ()
    return (
        StepSettled(
            run=message.run,
            step=message.fork.point.step if message.fork else 0,
            state=message.state,
            metrics=message.metrics,
            versions=message.versions,
            files=message.files,
            weights_name=message.weights_name,
            at=meta.now.timestamp(),
            weights=message.fork.weights if message.fork else (),
            spent=spent_by([message.work]),
        ),
    )


def _prefix_of(event: RunEvent) -> Prefix | None:
    """Return what the stream of a fork continues: that of its parent, up to a version."""
    if not isinstance(event, RunRequested) or event.fork is None:
        return None
    return run_stream(event.fork.parent), event.fork.position


def _settle_group(state: RunState, message: GroupGraded) -> tuple[RunEvent, ...]:
    key = message.spec.group_key
    step = state.open.get(key.step)
    if step is None or state.started is None or key.slot in step.settled:
        return ()
    if key.replacement != step.numbers.get(key.slot, 0):
        return ()
    advanced = state.started.spec.config.advanced
    group = settle(
        message, filters=filters_groups(advanced), compared_parts=tuple(part_weights(advanced))
    )
    settled = GroupsSettled(owner=key.owner, purpose=key.purpose, step=key.step, groups=(group,))
    return (settled, *_warn_of_alarm(state, message))


def _warn_of_alarm(state: RunState, message: GroupGraded) -> tuple[RunEvent, ...]:
    """Warn with the engine's alarm, unless this run has recorded the same alarm already."""
    spec = message.spec
    alarms = (entry.alarm for entry in message.entries if entry.alarm)
    new = next((alarm for alarm in alarms if alarm not in state.alarms), None)
    if new is None:
        return ()
    step = spec.group_key.step
    return (RunWarned(run=spec.owner, step=step, message=new, about="sampler"),)


def _settle_step(state: RunState, message: PolicyUpdated, meta: Meta) -> tuple[RunEvent, ...]:
    if state.training != message.step:
        return ()
    at = meta.now.timestamp()
    metrics = {**state.batch_metrics, **message.metrics}
    return (
        *_skip_unhealthy(message),
        *_warn_of_fork(message),
        StepSettled(
            run=message.run,
            step=message.step,
            state=message.state,
            metrics={**metrics, **_waiting_time(state, metrics, at)},
            batch=message.batch,
            plan=message.plan,
            versions=message.versions,
            at=at,
            spent=spent_by([message.work]),
        ),
    )


def _skip_unhealthy(message: PolicyUpdated) -> tuple[RunEvent, ...]:
    """Record that a step was taken and changed nothing, because its loss or gradients were not
    finite."""
    if not is_unhealthy(message.metrics):
        return ()
    reason = unhealthy_step_message(message.step)
    skipped = StepSkipped(run=message.run, step=message.step, reason=reason, batch=message.batch)
    return (skipped,)


def _warn_of_fork(message: PolicyUpdated) -> tuple[RunEvent, ...]:
    """Record that this step and all later ones follow from other bits than those of the log."""
    if message.fork is None:
        return ()
    text = f"from step {message.step} on, the bits diverge from the log: {message.fork}"
    return (RunWarned(run=message.run, step=message.step, message=text, about="fork"),)


def _waiting_time(state: RunState, metrics: Mapping[str, float], at: float) -> dict[str, float]:
    """Return, as a metric in seconds, how much of the time since the last step is not explained by this
    step's measured parts. If sampling runs ahead, only the learner's parts lie in that time."""
    if state.settled_at is None:
        return {}
    lasted = OWN_TIMES if state.pace.depth else [key for key in metrics if key.startswith("time/")]
    parts = sum(metrics.get(key, 0.0) for key in lasted)
    return {"time/wait_s": round(max(0.0, at - state.settled_at - parts), 4)}


def _settle_checkpoint(state: RunState, message: CheckpointSaved) -> tuple[RunEvent, ...]:
    if state.checkpointing != message.spec.step:
        return ()
    return (
        CheckpointSettled(
            run=message.spec.run,
            step=message.spec.step,
            manifest_sha256=message.manifest.sha256,
            spent=spent_by([message.work]),
        ),
    )


def _fail_checkpoint(state: RunState, message: CheckpointFailed) -> RunFailed:
    good = f"{message.run}@{state.checkpointed}" if state.checkpointed else "none"
    text = f"the checkpoint of step {message.step} failed: {message.message}; last good one: {good}"
    return RunFailed(run=message.run, kind="error", message=text)


def _settle_evaluation(state: RunState, message: EvaluationCompleted) -> tuple[RunEvent, ...]:
    step = message.step or 0
    if step not in state.evaluating or state.request is None:
        return ()
    run = state.request.run
    settled = EvaluationSettled(
        run=run,
        step=step,
        reward=message.reward,
        metrics=message.metrics,
        spent=message.spent,
        usd=message.usd,
    )
    if message.status == "finished":
        return (settled,)
    text = f"the validation at step {step} {message.status}: {message.message or 'no reason given'}"
    return (settled, RunWarned(run=run, step=step, message=text))


def _failure_text(message: PolicyFailed) -> str:
    what = f"step {message.step}" if message.step else "the start of the learner"
    return f"{what} failed: {message.message}"


RUN_ENDS = (RunRejected, RunStopped, RunFailed, RunFinished)

OWN_TIMES = ("time/learn_s", "time/publish_s")
"""The events by which the learner answers a step."""

RUN_EVENTS = (
    RunRejected,
    RunStarted,
    PoolsDecided,
    GroupsRequested,
    GroupsSettled,
    BatchAssembled,
    StepSkipped,
    StepSettled,
    RunWarned,
    CheckpointRequested,
    CheckpointSettled,
    EvaluationRequested,
    EvaluationSettled,
    BudgetExhausted,
    RunPaused,
    RunResumed,
    RunStopRequested,
    RunStopped,
    RunFailed,
    RunFinished,
)

CONSUMER: Consumer[RunState, RunEvent, RunMessage, Never, Never] = Consumer(
    name=ConsumerName("run"),
    category="run",
    reads=get_args(RunMessage),
    emits=RUN_EVENTS,
    effects=(),
    initial=RunState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    fold_version=14,
    snapshots=RunState,
    prefix_of=_prefix_of,
)
