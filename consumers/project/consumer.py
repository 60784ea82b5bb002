"""Projects every event into the tables that the API and the dashboard read.
Reads: every event.  Emits: nothing.  Stream: none; it tails the log with a cursor of its own.
Does: turns events into rows; a batch and the cursor are one commit.  Waits for: nothing.
Safe to repeat because: the cursor moves with the rows, and writing an existing row changes nothing.

An event that cannot be turned into rows does not stop the others. It is recorded in the table
`skipped_events`, in the same commit, until the read model is rebuilt (`headrace rebuild`)."""

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from datetime import datetime
from functools import singledispatch
from typing import Protocol

from pydantic import TypeAdapter

from consumers.error_excerpt import excerpt
from consumers.project.dead_letters import letters
from consumers.project.log_lines import narrate
from infra.ports.event_log import Cursor, EventLog, Recorded
from infra.postgres.errors import UNAVAILABLE_ERRORS
from infra.postgres.notify import Wakeup
from infra.readmodel.rows import (
    ChangeEvaluation,
    ChangeRun,
    ChangeWorkspace,
    DropDataset,
    DropHistory,
    DropRun,
    PutCheckpoint,
    PutDataset,
    PutEvaluation,
    PutGroup,
    PutMetric,
    PutRun,
    PutSkippedEvent,
    PutWorkspace,
    Unarchive,
    Write,
)
from infra.readmodel.store import PROJECT
from infra.task_cancellation import go_on
from schemas.events import (
    CheckpointSaved,
    DatasetDeleted,
    DatasetRegistered,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationSettled,
    EvaluationStarted,
    Event,
    GroupGraded,
    PolicyInitialized,
    RepositoryPushed,
    RunArchived,
    RunDeleted,
    RunFailed,
    RunFinished,
    RunPaused,
    RunRejected,
    RunRenamed,
    RunRequested,
    RunRestored,
    RunResumed,
    RunStarted,
    RunStopped,
    RunStopRequested,
    StepSettled,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import GroupKey, category, run_stream
from schemas.sampling import Grade

logger = logging.getLogger(__name__)

GRADES = TypeAdapter(tuple[Grade, ...])
"""Rows keep grades as JSON; what is not finite becomes null."""

BATCH = 500
SLOW_POLL_S = 5.0

TURNS = frozenset(kind.type for kind in (RunArchived, RunRestored, RunDeleted, DatasetDeleted))
"""Events after which rows are deleted or come back."""

REWARD = "rollout/raw_reward"
VALIDATION = "eval/validation/reward"


class Tables(Protocol):
    """The tables of the read model (`infra.readmodel.store.ReadModel`)."""

    async def cursor(self) -> Cursor: ...
    async def apply(self, writes: list[Write], *, before: Cursor, after: Cursor) -> bool: ...
    async def reset(self) -> None: ...


class Wakeups(Protocol):
    """Signals that the log has grown (`infra.postgres.notify.Notifier`)."""

    def subscribe(self) -> Wakeup: ...


class Projector:
    """Keeps the tables up to date with the log, until it is cancelled."""

    def __init__(self, log: EventLog, readmodel: Tables, *, wakeups: Wakeups | None = None) -> None:
        self._log = log
        self._tables = readmodel
        self._wakeup = wakeups.subscribe() if wakeups else Wakeup()

    async def run(self) -> None:
        """Project new events until cancelled. A lost wake-up only delays the next batch until the slow
        poll. The same holds when the database does not answer, because the cursor says where to
        continue."""
        while True:
            if await self._try_step() == 0:
                await self._await_news()

    async def _await_news(self) -> None:
        """Wait for a wake-up in a separate task. `asyncio.wait_for` of Python 3.11 can lose a
        cancellation that comes together with the wake-up, and then this loop would never end."""
        waiting = asyncio.ensure_future(self._wakeup.wait(SLOW_POLL_S))
        try:
            await asyncio.wait({waiting})
        finally:
            waiting.cancel()

    async def _try_step(self) -> int:
        try:
            return await self.step()
        except UNAVAILABLE_ERRORS as error:
            go_on()
            logger.warning("the read model cannot be updated until the database answers: %s", error)
            return 0

    async def step(self) -> int:
        """Project one batch. Returns how many events it held; 0 if nothing is new below the horizon."""
        before = await self._tables.cursor()
        events, after = await self._log.tail(before, limit=BATCH)
        if after == before:
            return 0
        events, after = _until_turn(events, after)
        if events and events[0].type == RunRestored.type:
            await self._project_again(events[0].run, before)
        writes = [write for recorded in events for write in writes_of(recorded)]
        if not await self._tables.apply(writes, before=before, after=after):
            logger.info("another process projects the events after %s", before)
        return max(1, len(events))

    async def _project_again(self, run: str, cursor: Cursor) -> None:
        """Project the events of a restored run, which lie far below the cursor. Putting a row that
        exists changes nothing, and the last change wins, so a repeat is harmless."""
        owners = [run]
        for owner in owners:
            after = Cursor()
            while page := await self._log.read(owner, after=after, limit=BATCH):
                events = [r for r in page if r.type not in TURNS]
                writes = [write for recorded in events for write in writes_of(recorded)]
                await self._tables.apply(writes, before=cursor, after=cursor)
                owners += [w.evaluation for w in writes if isinstance(w, PutEvaluation) and w.run]
                after = page[-1].cursor

    async def rebuild(self) -> int:
        """Empty the tables and project the whole log again. Returns the number of events."""
        await self._tables.reset()
        total = 0
        while count := await self.step():
            total += count
        return total


def _until_turn(events: Sequence[Recorded], after: Cursor) -> tuple[Sequence[Recorded], Cursor]:
    """Return the events before the first one that deletes or restores rows (or only that event, if it
    comes first), and the cursor behind them. The split is needed because a batch writes all its rows
    before it deletes any, whatever their order in the log."""
    turn = next((n for n, recorded in enumerate(events) if recorded.type in TURNS), None)
    if turn is None:
        return events, after
    part = events[: max(1, turn)]
    return part, part[-1].cursor


def writes_of(recorded: Recorded) -> tuple[Write, ...]:
    """Return the writes of an event. If its projection raises, Headrace has a bug or does not know the
    payload. The event is then recorded as skipped, and the events around it are still projected."""
    try:
        return project(recorded)
    except Exception as error:
        logger.exception(
            "the read model skips %s %s; correct the cause, then run `headrace rebuild`",
            recorded.type,
            recorded.id,
        )
        return (_skipped_event(recorded, error),)


def _skipped_event(recorded: Recorded, error: Exception) -> PutSkippedEvent:
    return PutSkippedEvent(
        projection=PROJECT,
        event=str(recorded.id),
        run=recorded.run,
        event_type=recorded.type,
        stream=recorded.stream,
        version=recorded.version,
        xid=recorded.cursor.xid,
        position=recorded.cursor.position,
        error=excerpt(f"{type(error).__name__}: {error}"),
        at=recorded.time,
    )


def project(recorded: Recorded) -> tuple[Write, ...]:
    """Return the writes of one event, log lines and dead letters included. Raises what its projection
    raises."""
    return (*rows(recorded.event, recorded.time), *letters(recorded), *narrate(recorded))


@singledispatch
def rows(event: Event, at: datetime) -> tuple[Write, ...]:
    """Return the rows of an event, without its log lines. Most events have no rows."""
    return ()


@rows.register
def repository_pushed(event: RepositoryPushed, at: datetime) -> tuple[Write, ...]:
    put = PutWorkspace(event.workspace, event.workspace_name, event.commit.url, at)
    if event.requester is None:
        return (put, ChangeWorkspace(event.workspace, at, "syncing"))
    if category(event.requester) != "run":
        return (put,)
    return (put, ChangeRun(_requester(event.requester), at, phase="provision"))


@rows.register
def workspace_synced(event: WorkspaceSynced, at: datetime) -> tuple[Write, ...]:
    """A run's own commit may be old, and only one of its rollouts was examined. So the workspace shows
    the result of its own pushes (`consumers/sync/consumer.py` makes one when a run finds a new head)."""
    if event.requester is not None:
        return ()
    rollouts = json.dumps([rollout.model_dump() for rollout in event.rollouts])
    return (ChangeWorkspace(event.workspace, at, "synced", event.commit, rollouts, ""),)


@rows.register
def workspace_rejected(event: WorkspaceRejected, at: datetime) -> tuple[Write, ...]:
    if event.requester is not None:
        return ()
    return (ChangeWorkspace(event.workspace, at, "error", error=event.message),)


@rows.register
def dataset_registered(event: DatasetRegistered, at: datetime) -> tuple[Write, ...]:
    ref = event.dataset
    put = PutDataset(
        dataset=ref.dataset,
        name=ref.name,
        ref=ref.model_dump_json(),
        columns=json.dumps(event.columns),
        num_rows=ref.num_rows,
        file_name=event.file_name,
        file_size=event.file_size,
        original=event.original.model_dump_json(),
        created_at=at,
    )
    return (put,)


@rows.register
def run_requested(event: RunRequested, at: datetime) -> tuple[Write, ...]:
    config = event.config
    put = PutRun(
        run=event.run,
        name=event.run_name,
        created_at=at,
        algorithm=config.advanced.algorithm,
        execution_mode=config.advanced.execution_mode,
        model=config.experiment.model_path,
        dataset=event.dataset.name,
        rollout=config.experiment.rollout,
        workspace=event.workspace,
        config=config.model_dump_json(),
        dataset_ref=event.dataset.model_dump_json(),
    )
    return (put,)


@rows.register
def run_rejected(event: RunRejected, at: datetime) -> tuple[Write, ...]:
    return (_end_of_run(event.run, at, "failed", "error", event.message),)


@rows.register
def run_started(event: RunStarted, at: datetime) -> tuple[Write, ...]:
    change = ChangeRun(
        event.run,
        at,
        status="running",
        phase="setup",
        commit_sha=event.commit,
        current_step=0,
        total_steps=event.plan.total_steps,
        started_at=at,
    )
    return (change,)


@rows.register
def policy_initialized(event: PolicyInitialized, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, phase="train"),)


@rows.register
def group_graded(event: GroupGraded, at: datetime) -> tuple[Write, ...]:
    key = GroupKey.parse(event.spec.group)
    put = PutGroup(
        owner=key.owner,
        purpose=str(key.purpose),
        step=key.step,
        slot=key.slot,
        replacement=key.replacement,
        dataset_row=event.spec.row,
        num_samples=len(event.entries),
        artifact=event.artifact.model_dump_json(),
        grades=GRADES.dump_json(event.grades).decode(),
        at=at,
    )
    return (put, ChangeRun(event.spec.template.run or key.owner, at))


@rows.register
def step_settled(event: StepSettled, at: datetime) -> tuple[Write, ...]:
    reward = event.metrics.get(REWARD)
    change = ChangeRun(
        event.run,
        at,
        current_step=event.step,
        reward=reward if reward is not None and math.isfinite(reward) else None,
    )
    return (change, *_metric_points(event.run, event.step, event.metrics, at))


@rows.register
def evaluation_settled(event: EvaluationSettled, at: datetime) -> tuple[Write, ...]:
    metrics = dict(event.metrics)
    if event.reward is not None:
        metrics.setdefault(VALIDATION, event.reward)
    return (ChangeRun(event.run, at), *_metric_points(event.run, event.step, metrics, at))


@rows.register
def checkpoint_saved(event: CheckpointSaved, at: datetime) -> tuple[Write, ...]:
    put = PutCheckpoint(
        run=event.spec.run,
        step=event.spec.step,
        reward=event.reward,
        uri=event.manifest.uri,
        manifest_sha256=event.manifest.sha256,
        adapter_sha256=event.spec.state.weights_sha256,
        created_at=at,
    )
    return (put, ChangeRun(event.spec.run, at))


@rows.register
def run_stop_requested(event: RunStopRequested, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, phase="finalize"),)


@rows.register
def run_paused(event: RunPaused, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, phase="paused"),)


@rows.register
def run_resumed(event: RunResumed, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, phase="train"),)


@rows.register
def run_stopped(event: RunStopped, at: datetime) -> tuple[Write, ...]:
    return (_end_of_run(event.run, at, "stopped", "complete"),)


@rows.register
def run_failed(event: RunFailed, at: datetime) -> tuple[Write, ...]:
    status = "crashed" if event.kind == "crash" else "failed"
    return (_end_of_run(event.run, at, status, "error", event.message),)


@rows.register
def run_finished(event: RunFinished, at: datetime) -> tuple[Write, ...]:
    return (_end_of_run(event.run, at, "finished", "complete"),)


@rows.register
def run_renamed(event: RunRenamed, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, name=event.run_name),)


@rows.register
def run_archived(event: RunArchived, at: datetime) -> tuple[Write, ...]:
    """The run's history leaves the log, so the event itself says where the run ended."""
    change = ChangeRun(
        event.run,
        at,
        name=event.run_name,
        status=event.status,
        phase=event.phase,
        commit_sha=event.commit,
        current_step=event.current_step,
        total_steps=event.total_steps,
        reward=event.reward,
        error=event.error,
        started_at=event.started_at,
        completed_at=event.completed_at,
        archived_at=at,
    )
    return (change, DropHistory(event.run))


@rows.register
def run_restored(event: RunRestored, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, restored_at=at), Unarchive(event.run))


@rows.register
def run_deleted(event: RunDeleted, at: datetime) -> tuple[Write, ...]:
    return (DropRun(event.run),)


@rows.register
def dataset_deleted(event: DatasetDeleted, at: datetime) -> tuple[Write, ...]:
    return (DropDataset(event.dataset),)


@rows.register
def evaluation_requested(event: EvaluationRequested, at: datetime) -> tuple[Write, ...]:
    experiment = event.config.experiment if event.config else None
    dataset = event.template.dataset
    put = PutEvaluation(
        evaluation=event.evaluation,
        name=event.eval_name,
        run=event.run,
        step=event.step,
        model=experiment.model_path if experiment else event.template.model.name,
        dataset=dataset.name,
        rollout=experiment.rollout if experiment else None,
        config=event.config.model_dump_json() if event.config else None,
        dataset_ref=dataset.model_dump_json(),
        total=len(event.rows),
        created_at=at,
    )
    return (put,)


@rows.register
def evaluation_started(event: EvaluationStarted, at: datetime) -> tuple[Write, ...]:
    return (ChangeEvaluation(event.evaluation, status="running", started_at=at),)


@rows.register
def evaluation_completed(event: EvaluationCompleted, at: datetime) -> tuple[Write, ...]:
    change = ChangeEvaluation(
        event.evaluation,
        status=event.status,
        reward=event.reward,
        metrics=json.dumps({k: v for k, v in event.metrics.items() if math.isfinite(v)}),
        error=event.message,
        completed_at=at,
    )
    return (change,)


def _end_of_run(
    run: str, at: datetime, status: str, phase: str, error: str | None = None
) -> ChangeRun:
    return ChangeRun(run, at, status=status, phase=phase, error=error, completed_at=at)


def _metric_points(
    run: str, step: int, metrics: dict[str, float], at: datetime
) -> tuple[PutMetric, ...]:
    """A metric that is not finite has no point, because JSON has no NaN."""
    return tuple(
        PutMetric(run, key, step, value, at)
        for key, value in metrics.items()
        if math.isfinite(value)
    )


def _requester(stream: str) -> str:
    return stream.removeprefix(run_stream(""))
