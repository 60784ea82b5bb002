"""The log lines of a run or an evaluation, in plain English: a few lines for some events.

Lines are for people. Each says one thing worth knowing, with the step it belongs to. Programs read the
events instead.
"""

from collections.abc import Iterator
from functools import singledispatch

from infra.readmodel.rows import PutLog
from infra.spine.ports.event_log import Recorded
from schemas.events import (
    BudgetExhausted,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationCompleted,
    EvaluationImported,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationSettled,
    EvaluationStarted,
    EvaluationStopRequested,
    Event,
    GroupGraded,
    GroupsSettled,
    HubUploaded,
    HubUploadFailed,
    HubUploadRequested,
    MessageDeadLettered,
    MessageRedriven,
    ModelDeployed,
    ModelDeploySkipped,
    PackagesChosen,
    PolicyFailed,
    PolicyInitialized,
    PoolsDecided,
    RunApproved,
    RunArchived,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunRejected,
    RunRenamed,
    RunRequested,
    RunResumed,
    RunStarted,
    RunStopped,
    RunStopRequested,
    RunWarned,
    SampleRefuted,
    StepSettled,
    StepSkipped,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import GroupKey, StreamName
from schemas.learner import GGUF_VERSION

Line = tuple[str, int | None, str]
"""Level, step, message."""

LONGEST = 2000
"""Characters of a line. Messages of user code are quoted up to this length."""

SAMPLED = "rollout/num_samples"
"""A metric of each step whose answers were sampled. Their lengths have other limits than rows, and
groups with equal rewards have a warning of their own."""
SHOWN_METRICS = {
    "rollout/raw_reward": "reward",
    "train/loss": "loss",
    "eval/validation/loss": "held-out loss",
    "eval/validation/accuracy": "held-out accuracy",
    "rewards/margins": "margin",
    "train/kl": "kl",
    "train/grad_norm": "gradient norm",
}


def narrate(recorded: Recorded) -> tuple[PutLog, ...]:
    """Return the log lines of one event."""
    return tuple(
        PutLog(
            run=_about(recorded.event),
            xid=recorded.cursor.xid,
            position=recorded.cursor.position,
            line=number,
            at=recorded.time,
            level=level,
            step=step,
            message=message[:LONGEST],
        )
        for number, (level, step, message) in enumerate(lines(recorded.event))
    )


def _about(event: Event) -> str:
    """Return the run or evaluation whose log gets the lines. A workspace's answer to a run belongs to
    the run."""
    if isinstance(event, PackagesChosen | WorkspaceSynced | WorkspaceRejected) and event.requester:
        return _owner(event.requester)
    if isinstance(event, EvaluationRequested):
        return event.evaluation
    if isinstance(event, ModelDeployed):
        return event.served.run
    if isinstance(event, ModelDeploySkipped):
        return event.run
    if isinstance(event, HubUploadRequested | HubUploaded | HubUploadFailed):
        return event.upload.run
    return event.run_id


def _owner(stream: StreamName) -> str:
    return stream.partition("-")[2]


@singledispatch
def lines(event: Event) -> Iterator[Line]:
    """Return the lines of an event. Most events have none."""
    yield from ()


@lines.register
def workspace_synced(event: WorkspaceSynced) -> Iterator[Line]:
    yield "info", None, f"Commit {event.commit[:12]} is fetched"
    for rollout in event.rollouts:
        if rollout.error:
            yield "error", None, rollout.error


@lines.register
def packages_chosen(event: PackagesChosen) -> Iterator[Line]:
    for rollout in event.rollouts:
        if (chosen := rollout.environment) is not None and chosen.packages:
            name, number = rollout.entrypoint.rollout, chosen.packages
            what = "1 package" if number == 1 else f"{number} packages"
            text = f"Installing {what} of rollout {name} for Python {chosen.python}"
            yield "info", None, text


@lines.register
def workspace_rejected(event: WorkspaceRejected) -> Iterator[Line]:
    yield "error", None, event.message


@lines.register
def run_requested(event: RunRequested) -> Iterator[Line]:
    experiment, algorithm = event.config.experiment, event.config.advanced.algorithm
    yield (
        "info",
        None,
        f"Run {event.run_name} is requested: {algorithm} of {experiment.model_path} on "
        f"{event.dataset.name} ({event.dataset.num_rows} rows)",
    )
    if event.origin is not None:
        push = event.origin.push
        yield "info", None, f"A push of {push.after[:12]} to {push.ref} started the run"
    for warning in event.warnings:
        yield "warning", None, warning


@lines.register
def run_rejected(event: RunRejected) -> Iterator[Line]:
    yield "error", None, f"The run cannot start: {event.message}"


@lines.register
def run_started(event: RunStarted) -> Iterator[Line]:
    plan = event.plan
    shape = f"{plan.batch_size} rows"
    if event.template is not None:
        shape = f"{plan.batch_size} prompts x {plan.num_samples} samples"
    yield "info", 0, f"Started: {plan.total_steps} steps of {shape}"


@lines.register
def policy_initialized(event: PolicyInitialized) -> Iterator[Line]:
    if sha256 := event.versions.get(GGUF_VERSION):
        said = f"The model is a GGUF file (sha256 {sha256}), dequantized once to float32"
        yield "info", 0, said
    yield "info", 0, "The model is loaded; policy version 0 is ready"


@lines.register
def policy_failed(event: PolicyFailed) -> Iterator[Line]:
    yield "error", event.step, f"The learner failed: {event.message}"


@lines.register
def group_graded(event: GroupGraded) -> Iterator[Line]:
    """One line quotes the first failure of a group and counts the others."""
    step = GroupKey.parse(event.spec.group).step
    failed = [entry for entry in event.entries if entry.failure]
    if failed:
        first = failed[0]
        yield (
            "warning",
            step,
            f"{len(failed)} of {len(event.entries)} samples of row {event.spec.row} failed; "
            f"the first: {first.failure}: {first.message or 'no message'}",
        )
    ungraded = [grade for grade in event.grades if grade.failure]
    if ungraded and ungraded[0].failure:
        failure = ungraded[0].failure
        yield (
            "warning",
            step,
            f"{len(ungraded)} samples of row {event.spec.row} have no grade; "
            f"the first: {failure.category}: {failure.message}",
        )


@lines.register
def groups_settled(event: GroupsSettled) -> Iterator[Line]:
    for settled in event.groups:
        if settled.dropped:
            yield (
                "warning",
                event.step,
                f"The group in slot {settled.group.slot} is dropped: {settled.dropped}",
            )


@lines.register
def pools_decided(event: PoolsDecided) -> Iterator[Line]:
    moved = {"the easy pool": event.easy, "the hard pool": event.hard, "no pool": event.left}
    shown = [f"{len(rows)} to {pool}" for pool, rows in moved.items() if rows]
    if shown:
        sizes = f"{event.num_easy} easy, {event.num_hard} hard, {event.num_normal} in no pool"
        yield "info", event.step, f"Rows moved: {', '.join(shown)}; now {sizes}"


@lines.register
def step_settled(event: StepSettled) -> Iterator[Line]:
    if event.skipped or event.metrics.get("train/skipped"):
        return
    shown = [
        f"{label} {event.metrics[key]:.4g}"
        for key, label in SHOWN_METRICS.items()
        if key in event.metrics
    ]
    if shown or event.step:
        yield "info", event.step, f"Step {event.step} is done: {', '.join(shown) or 'no metrics'}"
    if SAMPLED in event.metrics:
        return
    if cut := event.metrics.get("train/truncated_ratio"):
        yield (
            "warning",
            event.step,
            f"{cut:.1%} of the rows of step {event.step} are longer than "
            "advanced.max_sequence_length and were cut at their end",
        )
    if lost := event.metrics.get("train/unlearned_ratio"):
        yield (
            "warning",
            event.step,
            f"{lost:.1%} of the rows of step {event.step} teach nothing, because no learned token, or "
            "no difference of a pair, is within advanced.max_sequence_length; set a larger one",
        )


@lines.register
def step_skipped(event: StepSkipped) -> Iterator[Line]:
    yield "warning", event.step, f"Step {event.step} is skipped: {event.reason}"


@lines.register
def sample_refuted(event: SampleRefuted) -> Iterator[Line]:
    yield (
        "warning",
        event.step,
        f"Sample {event.sample} is refuted ({event.test}): {event.server} did not draw it from version "
        f"{event.policy_version}; its logprobs differ by {event.distance:.2g} on average, and "
        f"{event.tokens} tokens were enough to tell. It is not trained, and is generated again",
    )


@lines.register
def run_warned(event: RunWarned) -> Iterator[Line]:
    yield "warning", event.step, event.message


@lines.register
def checkpoint_saved(event: CheckpointSaved) -> Iterator[Line]:
    step = event.spec.step
    yield "info", step, f"Checkpoint {step} is saved ({event.manifest.sha256[:12]})"


@lines.register
def checkpoint_failed(event: CheckpointFailed) -> Iterator[Line]:
    yield "error", event.step, f"Checkpoint {event.step} could not be saved: {event.message}"


@lines.register
def evaluation_requested(event: EvaluationRequested) -> Iterator[Line]:
    if event.config is not None:
        yield "info", None, f"Evaluation {event.eval_name} is requested: {len(event.rows)} rows"


@lines.register
def evaluation_started(event: EvaluationStarted) -> Iterator[Line]:
    yield "info", event.step, f"Evaluating {len(event.rows)} rows of {event.template.dataset.name}"


@lines.register
def evaluation_completed(event: EvaluationCompleted) -> Iterator[Line]:
    if event.status == "failed":
        yield "error", event.step, f"The evaluation failed: {event.message or 'no reason given'}"
        return
    reward = "no reward" if event.reward is None else f"reward {event.reward:.4g}"
    yield "info", event.step, f"The evaluation {event.status}: {reward}"


@lines.register
def evaluation_retry_requested(event: EvaluationRetryRequested) -> Iterator[Line]:
    yield "info", None, f"Retry {event.number}: the attempts without a reward are repeated"


@lines.register
def evaluation_imported(event: EvaluationImported) -> Iterator[Line]:
    again = f", import {event.number}" if event.number > 1 else ""
    said = f"{event.rows} rows of local run {event.local_run.name} ({event.local_run.id}){again}"
    yield "info", None, f"Imported {said} by {event.importer or 'the operator'}; not graded here"


@lines.register
def evaluation_stop_requested(event: EvaluationStopRequested) -> Iterator[Line]:
    yield "info", None, "A stop is requested"


@lines.register
def evaluation_settled(event: EvaluationSettled) -> Iterator[Line]:
    reward = "no reward" if event.reward is None else f"reward {event.reward:.4g}"
    yield "info", event.step, f"Validation after step {event.step}: {reward}"


@lines.register
def run_pause_requested(event: RunPauseRequested) -> Iterator[Line]:
    yield "info", None, "A pause is requested; it begins at the next step boundary"


@lines.register
def budget_exhausted(event: BudgetExhausted) -> Iterator[Line]:
    name = event.limit
    text = f"{name} is {event.most:g}, {event.used:.4g} is used, a step takes {event.estimate:.4g}"
    yield "warning", event.step, f"The budget is exhausted after step {event.step}: {text}"


@lines.register
def run_paused(event: RunPaused) -> Iterator[Line]:
    reason = f": {event.reason}" if event.reason else ""
    yield "info", event.step, f"Paused after step {event.step}{reason}"


@lines.register
def run_resumed(event: RunResumed) -> Iterator[Line]:
    yield "info", event.step, f"Resumed after step {event.step}"


@lines.register
def run_stop_requested(event: RunStopRequested) -> Iterator[Line]:
    yield "info", None, "A stop is requested; it ends with a checkpoint at the next step boundary"


@lines.register
def run_stopped(event: RunStopped) -> Iterator[Line]:
    yield "info", event.step, f"Stopped after step {event.step}"


@lines.register
def run_failed(event: RunFailed) -> Iterator[Line]:
    word = "crashed" if event.kind == "crash" else "failed"
    yield "error", None, f"The run {word}: {event.message}"


@lines.register
def run_finished(event: RunFinished) -> Iterator[Line]:
    reward = "" if event.reward is None else f"; reward {event.reward:.4g}"
    yield "info", event.step, f"Finished after {event.step} steps{reward}"


@lines.register
def message_dead_lettered(event: MessageDeadLettered) -> Iterator[Line]:
    yield (
        "error",
        None,
        f"{event.consumer} could not decide on {event.message_type}; it is a dead letter: "
        f"{event.cause}",
    )


@lines.register
def run_approved(event: RunApproved) -> Iterator[Line]:
    yield "info", None, "Run is approved"


@lines.register
def run_renamed(event: RunRenamed) -> Iterator[Line]:
    yield "info", None, f"Run is renamed to {event.run_name}"


@lines.register
def run_archived(event: RunArchived) -> Iterator[Line]:
    yield (
        "info",
        None,
        f"Run is archived: {event.num_events} events and {event.num_artifacts} artifacts in "
        f"{event.archive.uri}",
    )


@lines.register
def message_redriven(event: MessageRedriven) -> Iterator[Line]:
    yield "info", None, f"{event.consumer} gets a dead letter again ({event.letter})"


@lines.register
def model_deployed(event: ModelDeployed) -> Iterator[Line]:
    yield "info", event.served.step, f"Deployed {event.served.ref} as {event.served.model_name}"


@lines.register
def model_deploy_skipped(event: ModelDeploySkipped) -> Iterator[Line]:
    yield "warning", None, f"Nothing is deployed as {event.deployment}: {event.reason}"


@lines.register
def hub_upload_requested(event: HubUploadRequested) -> Iterator[Line]:
    upload = event.upload
    yield "info", upload.step, f"{upload.ref} is to be uploaded to {upload.repository}"


@lines.register
def hub_uploaded(event: HubUploaded) -> Iterator[Line]:
    upload = event.upload
    yield "info", upload.step, f"Uploaded {upload.ref} to {event.url} (revision {event.revision})"


@lines.register
def hub_upload_failed(event: HubUploadFailed) -> Iterator[Line]:
    upload = event.upload
    yield "error", upload.step, f"{upload.ref} is not on {upload.repository}: {event.message}"
