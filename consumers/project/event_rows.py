"""Turns each event into rows of the read model. Most events have no rows."""

import json
import math
import re
from datetime import datetime
from functools import singledispatch

from pydantic import TypeAdapter

from infra.readmodel.estimates import HIGH, LOW, interval_of
from infra.readmodel.rows import (
    ChangeEvaluation,
    ChangeRun,
    ChangeWorkspace,
    DropArtifact,
    DropDataset,
    DropGivenSecrets,
    DropHistory,
    DropReplacedGroups,
    DropRun,
    PutArtifact,
    PutCheckpoint,
    PutDataset,
    PutEvaluation,
    PutGroup,
    PutMetric,
    PutRun,
    PutWorkspace,
    Unarchive,
    Write,
)
from schemas.events import (
    ArtifactPublished,
    ArtifactWithdrawn,
    CheckpointSaved,
    CommitRequested,
    DatasetDeleted,
    DatasetRegistered,
    EvaluationCompleted,
    EvaluationImported,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationRowsImported,
    EvaluationSettled,
    EvaluationStarted,
    Event,
    GroupGraded,
    PackagesChosen,
    PolicyInitialized,
    RunApproved,
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
from schemas.ids import GroupKey, Purpose, SemanticVersion, category, run_stream
from schemas.sampling import Grade

GRADES = TypeAdapter(tuple[Grade, ...])
"""Rows keep grades as JSON; what is not finite becomes null."""

REFS = re.compile("^refs/(heads|tags)/")
REWARD = "rollout/raw_reward"
VALIDATION = "eval/validation/reward"


@singledispatch
def rows(event: Event, at: datetime) -> tuple[Write, ...]:
    """Return the rows of an event, without its log lines. Most events have no rows."""
    return ()


@rows.register
def commit_requested(event: CommitRequested, at: datetime) -> tuple[Write, ...]:
    put = PutWorkspace(event.workspace, event.workspace_name, event.commit.url, at)
    if event.requester is None:
        return (put, ChangeWorkspace(event.workspace, at, "syncing"))
    if category(event.requester) != "run":
        return (put,)
    return (put, ChangeRun(_requester(event.requester), at, phase="provision"))


@rows.register
def workspace_synced(event: WorkspaceSynced, at: datetime) -> tuple[Write, ...]:
    """A run's own commit may be old, and only one of its rollouts was examined. So the workspace shows
    the result of its own requests. `consumers/sync/consumer.py` makes one when a run sees a new head."""
    if event.requester is not None:
        return ()
    rollouts = json.dumps([rollout.model_dump() for rollout in event.rollouts])
    return (ChangeWorkspace(event.workspace, at, "synced", event.commit, rollouts, ""),)


@rows.register
def packages_chosen(event: PackagesChosen, at: datetime) -> tuple[Write, ...]:
    if event.requester is not None:
        return ()
    rollouts = json.dumps([rollout.model_dump() for rollout in event.rollouts])
    return (ChangeWorkspace(event.workspace, at, "installing", event.commit, rollouts),)


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
        workspace=event.workspace,
        organisation=event.organisation,
        version=ref.version,
        series=event.series or ref.dataset,
    )
    return (put,)


@rows.register
def artifact_published(event: ArtifactPublished, at: datetime) -> tuple[Write, ...]:
    version = SemanticVersion.parse(event.semver)
    put = PutArtifact(
        artifact=event.artifact,
        organisation=event.organisation,
        kind=event.kind,
        name=event.artifact_name,
        semver=event.semver,
        precedence=version.precedence,
        is_prerelease=version.is_prerelease,
        sha256=event.content.sha256,
        file_size=event.content.size,
        num_files=event.num_files,
        unpacked_bytes=event.unpacked_bytes,
        summary=event.summary,
        publisher=event.published_by,
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
        workspace=event.owner_workspace,
        config=config.model_dump_json(),
        dataset_ref=event.dataset.model_dump_json(),
        creator=_creator(event),
        parent=event.fork.parent if event.fork else None,
        parent_step=event.fork.step if event.fork else None,
    )
    if event.needs_approval:
        return (put, ChangeRun(event.run, at, phase="approval"))
    return (put,)


def _creator(event: RunRequested) -> str | None:
    """The push that started a run, or the owner of the API key that submitted it."""
    if event.origin is not None:
        return f"push to {REFS.sub('', event.origin.push.ref)}"
    return event.creator or event.submitter


@rows.register
def run_approved(event: RunApproved, at: datetime) -> tuple[Write, ...]:
    return (ChangeRun(event.run, at, phase="init"),)


@rows.register
def run_rejected(event: RunRejected, at: datetime) -> tuple[Write, ...]:
    return _end_of_run(event.run, at, "failed", "error", event.message)


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
        judgements=event.judgements.model_dump_json() if event.judgements else None,
        attempts=json.dumps(event.spec.attempts) if event.spec.attempts else None,
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
    if interval := interval_of(event.metrics, "eval/reward"):
        metrics |= dict(zip((VALIDATION + LOW, VALIDATION + HIGH), interval, strict=True))
    return (ChangeRun(event.run, at), *_metric_points(event.run, event.step, metrics, at))


@rows.register
def checkpoint_saved(event: CheckpointSaved, at: datetime) -> tuple[Write, ...]:
    put = PutCheckpoint(
        run=event.spec.run,
        step=event.spec.step,
        reward=event.reward,
        uri=event.manifest.uri,
        manifest_sha256=event.manifest.sha256,
        adapter_sha256=event.adapter_sha256,
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
    return _end_of_run(event.run, at, "stopped", "complete")


@rows.register
def run_failed(event: RunFailed, at: datetime) -> tuple[Write, ...]:
    status = "crashed" if event.kind == "crash" else "failed"
    return _end_of_run(event.run, at, status, "error", event.message)


@rows.register
def run_finished(event: RunFinished, at: datetime) -> tuple[Write, ...]:
    return _end_of_run(event.run, at, "finished", "complete")


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
def artifact_withdrawn(event: ArtifactWithdrawn, at: datetime) -> tuple[Write, ...]:
    return (DropArtifact(event.artifact),)


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
        workspace=event.workspace,
    )
    return (put,)


@rows.register
def evaluation_started(event: EvaluationStarted, at: datetime) -> tuple[Write, ...]:
    return (ChangeEvaluation(event.evaluation, status="running", started_at=at),)


@rows.register
def evaluation_retry_requested(event: EvaluationRetryRequested, at: datetime) -> tuple[Write, ...]:
    return (ChangeEvaluation(event.evaluation, status="running", error=""),)


@rows.register
def evaluation_completed(event: EvaluationCompleted, at: datetime) -> tuple[Write, ...]:
    change = ChangeEvaluation(
        event.evaluation,
        status=event.status,
        reward=event.reward,
        metrics=json.dumps({k: v for k, v in event.metrics.items() if math.isfinite(v)}),
        error=event.message,
        completed_at=event.ended_at or at,
    )
    return (change, DropGivenSecrets(event.evaluation, at))


@rows.register
def evaluation_imported(event: EvaluationImported, at: datetime) -> tuple[Write, ...]:
    put = PutEvaluation(
        evaluation=event.evaluation,
        name=event.eval_name,
        run=None,
        step=None,
        model=event.config.experiment.model_path,
        dataset=event.dataset.name,
        rollout=event.config.experiment.rollout,
        config=event.config.model_dump_json(),
        dataset_ref=event.dataset.model_dump_json(),
        total=event.rows,
        created_at=at,
        workspace=event.workspace,
    )
    change = ChangeEvaluation(event.evaluation, started_at=event.started_at)
    return (put, change, DropReplacedGroups(event.evaluation, event.number - 1))


@rows.register
def evaluation_rows_imported(event: EvaluationRowsImported, at: datetime) -> tuple[Write, ...]:
    return tuple(
        PutGroup(
            owner=event.evaluation,
            purpose=str(Purpose.EVALUATE),
            step=0,
            slot=row.slot,
            replacement=event.number - 1,
            dataset_row=row.row,
            num_samples=len(row.grades),
            artifact=row.artifact.model_dump_json(),
            grades=GRADES.dump_json(row.grades).decode(),
            at=at,
            attempts=json.dumps(row.attempts),
        )
        for row in event.rows
    )


def _end_of_run(
    run: str, at: datetime, status: str, phase: str, error: str | None = None
) -> tuple[Write, ...]:
    """The rows of a run that ended. Secrets that were given for it alone go with it."""
    change = ChangeRun(run, at, status=status, phase=phase, error=error, completed_at=at)
    return (change, DropGivenSecrets(run, at))


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
