"""THE catalogue: every event, in the order a run lives them.

Events are facts in the past tense, frozen, small (64 KiB at most); tokens, transcripts and weights
travel as ArtifactRef. Each class says its wire type, its version, its Kafka topic, and (`gate`)
whether it opens, pauses or closes the run it belongs to. An additive change with a default keeps the
version; anything else bumps it and adds a function to `schemas/upcasts.py`.
"""

from datetime import datetime
from typing import ClassVar, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from schemas.config import EvalConfig, RunConfig
from schemas.ids import (
    Purpose,
    StreamName,
    checkpoint_stream,
    dataset_stream,
    dead_letter_stream,
    eval_stream,
    grade_stream,
    group_stream,
    policy_stream,
    run_stream,
    verify_stream,
    workspace_stream,
)
from schemas.sampling import ArtifactRef, Grade, ModelRef, Sha256
from schemas.specs import (
    BatchGroup,
    CheckpointSpec,
    CommitSpec,
    DatasetRef,
    DiscoveredRollout,
    Entrypoint,
    Finding,
    GroupSpec,
    GroupTemplate,
    Plan,
    SampleEntry,
    Slot,
    StateRef,
    TrainSpec,
)

MAX_EVENT_BYTES = 64 * 1024
"""The largest payload an event may have, as JSON."""

Gate = Literal["open", "paused", "closed"]
Hold = Literal["hold", "release"]

WORKSPACE_TOPIC = "rl.workspace.v1"
RUN_TOPIC = "rl.run.v1"
GROUP_TOPIC = "rl.group.v1"
DEAD_LETTER_TOPIC = "rl.dead-letter.v1"


class Event(BaseModel):
    """Root of all events.

    `stream` is the stream an event belongs to (its owner appends it there, or an edge). `key` is the
    Kafka message key. `run_id` names the run, evaluation or workspace the event is about. `name`
    tells apart events that one cause brings about; together with the cause it is the event's id.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    type: ClassVar[str]
    version: ClassVar[int] = 1
    topic: ClassVar[str]
    gate: ClassVar[Gate | None] = None

    @property
    def hold(self) -> Hold | None:
        """Whether the run is held until something is put right, whatever its gate; or released."""
        return None

    @property
    def stream(self) -> StreamName:
        raise NotImplementedError

    @property
    def run_id(self) -> str:
        raise NotImplementedError

    @property
    def key(self) -> str:
        return self.run_id

    @property
    def name(self) -> str:
        return self.type


class _WorkspaceEvent(Event):
    topic: ClassVar[str] = WORKSPACE_TOPIC
    workspace: str

    @property
    def stream(self) -> StreamName:
        return workspace_stream(self.workspace)

    @property
    def run_id(self) -> str:
        return self.workspace


class RepositoryPushed(_WorkspaceEvent):
    """A repository may have something new, or a run needs a commit of it. A hint: sync resolves the
    ref when it runs. `requester` is the stream that waits for the answer, if one does."""

    type: ClassVar[str] = "rl.workspace.pushed"
    workspace_name: str
    commit: CommitSpec
    entrypoints: tuple[Entrypoint, ...] = ()
    requester: StreamName | None = None


class WorkspaceSynced(_WorkspaceEvent):
    """A commit was fetched, its snapshot stored, its entry points looked into."""

    type: ClassVar[str] = "rl.workspace.synced"
    push: UUID
    commit: str
    snapshot: ArtifactRef
    rollouts: tuple[DiscoveredRollout, ...]
    requester: StreamName | None = None


class WorkspaceRejected(_WorkspaceEvent):
    """The commit could not be fetched or its tree cannot be used; `message` says what to do."""

    type: ClassVar[str] = "rl.workspace.rejected"
    push: UUID
    message: str
    requester: StreamName | None = None


class DatasetRegistered(Event):
    """A dataset was uploaded, validated and stored. `columns` are named as they are read; `mapping` says
    what the file called those that have another name there. `characters`: those of prompts and labels,
    sorted, the first 512."""

    type: ClassVar[str] = "rl.dataset.registered"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    dataset: DatasetRef
    columns: tuple[str, ...]
    file_name: str
    file_size: int
    original: ArtifactRef
    mapping: dict[str, str] = {}
    characters: str = ""

    @property
    def stream(self) -> StreamName:
        return dataset_stream(self.dataset.dataset)

    @property
    def run_id(self) -> str:
        return self.dataset.dataset


class DatasetDeleted(Event):
    """A user deleted a dataset. Its registration is gone from the log; its name is free."""

    type: ClassVar[str] = "rl.dataset.deleted"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    dataset: str

    @property
    def stream(self) -> StreamName:
        return dataset_stream(self.dataset)

    @property
    def run_id(self) -> str:
        return self.dataset


class _RunEvent(Event):
    topic: ClassVar[str] = RUN_TOPIC
    run: str

    @property
    def stream(self) -> StreamName:
        return run_stream(self.run)

    @property
    def run_id(self) -> str:
        return self.run


class _StepEvent(_RunEvent):
    """One of a kind for each step."""

    step: int

    @property
    def name(self) -> str:
        return f"{self.type}/{self.step}"


class RunRequested(_RunEvent):
    """A validated, admitted request for a run. `workspace` is None when no user code is needed; chat
    templates take `date`, the day of the request, for today, unless the config names another.
    `warnings`: what can be run and is probably not meant."""

    type: ClassVar[str] = "rl.run.requested"
    run_name: str
    config: RunConfig
    model: ModelRef
    dataset: DatasetRef
    validation: DatasetRef | None = None
    workspace: str | None = None
    from_state: StateRef | None = None
    date: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def today(self) -> str | None:
        """What the run's chat templates take for today."""
        return self.config.advanced.date or self.date


class RunRejected(_RunEvent):
    """The run cannot start: its commit or entry point does not hold what its config needs."""

    type: ClassVar[str] = "rl.run.rejected"
    gate: ClassVar[Gate | None] = "closed"
    message: str


class RunStarted(_RunEvent):
    """The plan of the run is fixed. `template` is what its training groups share, but the policy."""

    type: ClassVar[str] = "rl.run.started"
    gate: ClassVar[Gate | None] = "open"
    plan: Plan
    spec: TrainSpec
    template: GroupTemplate | None = None
    validation: GroupTemplate | None = None
    commit: str | None = None


class _PolicyEvent(Event):
    topic: ClassVar[str] = RUN_TOPIC
    run: str

    @property
    def stream(self) -> StreamName:
        return policy_stream(self.run)

    @property
    def run_id(self) -> str:
        return self.run


class PolicyInitialized(_PolicyEvent):
    """Version 0 of the run's policy exists and is durable. `metrics`: what was measured of it."""

    type: ClassVar[str] = "rl.policy.initialized"
    spec: TrainSpec
    state: StateRef
    versions: dict[str, str]
    files: dict[str, ArtifactRef] = {}
    weights_name: str = "adapter_model.safetensors"
    metrics: dict[str, float] = {}


class PolicyFailed(_PolicyEvent):
    """The learner could not build or step the policy; the run cannot go on."""

    type: ClassVar[str] = "rl.policy.failed"
    step: int
    kind: Literal["error", "crash"]
    message: str


class _OwnerEvent(Event):
    """About groups of a step; `owner` is the run, or the evaluation, and has it in its stream."""

    topic: ClassVar[str] = RUN_TOPIC
    owner: str
    purpose: Purpose
    step: int

    @property
    def stream(self) -> StreamName:
        return run_stream(self.owner) if self.purpose == Purpose.TRAIN else eval_stream(self.owner)

    @property
    def run_id(self) -> str:
        return self.owner


class GroupsRequested(_OwnerEvent):
    """Groups of a step are due. Carries (dataset, row) pairs, never rows. `owner` is the run, or the
    evaluation."""

    type: ClassVar[str] = "rl.groups.requested"
    slots: tuple[Slot, ...]
    template: GroupTemplate

    @property
    def name(self) -> str:
        first = self.slots[0]
        return f"{self.type}/{self.purpose}/{self.step}/{first.slot}/{first.replacement}"

    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The groups asked for, each complete."""
        prefix = f"{self.owner}-{self.purpose}-{self.step}"
        return tuple(
            GroupSpec(
                group=f"{prefix}-{slot.slot}-{slot.replacement}",
                row=slot.row,
                template=self.template,
            )
            for slot in self.slots
        )


class _GroupEvent(Event):
    topic: ClassVar[str] = GROUP_TOPIC
    spec: GroupSpec

    @property
    def stream(self) -> StreamName:
        return group_stream(self.spec.group)

    @property
    def run_id(self) -> str:
        return self.spec.owner

    @property
    def key(self) -> str:
        return self.spec.group


class SampleGenerated(_GroupEvent):
    """One sample of a group, run by a user workflow, is finished (or failed, as data). No
    `artifact`: its workers died or gave up, and `entry` is all there is."""

    type: ClassVar[str] = "rl.sample.generated"
    entry: SampleEntry
    artifact: ArtifactRef | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.type}/{self.entry.index}"


class GroupGenerated(_GroupEvent):
    """All samples of a group are finished. `parts` hold them, in index order; a sample whose
    entry has failed may be missing there. `seconds`: what the slowest of them took."""

    type: ClassVar[str] = "rl.group.generated"
    entries: tuple[SampleEntry, ...]
    parts: tuple[ArtifactRef, ...]
    seconds: float = 0.0


class GroupGraded(_GroupEvent):
    """The grader scored a group. `artifact` holds all its samples. On `rl.run.v1`, because the run
    decides on it."""

    type: ClassVar[str] = "rl.group.graded"
    topic: ClassVar[str] = RUN_TOPIC
    artifact: ArtifactRef
    entries: tuple[SampleEntry, ...]
    grades: tuple[Grade, ...]
    generate_s: float = 0.0
    grade_s: float = 0.0

    @property
    def stream(self) -> StreamName:
        return grade_stream(self.spec.group)

    @property
    def key(self) -> str:
        return self.spec.owner


class SettledGroup(BaseModel):
    """A group that is kept for its batch, or dropped with the reason. `version`: the policy version
    that sampled it. `ungraded`: samples that were generated but have no reward, counted by the category
    of what went wrong in the grader."""

    model_config = ConfigDict(frozen=True)
    group: BatchGroup
    version: int = 0
    entries: tuple[SampleEntry, ...] = ()
    dropped: str | None = None
    ungraded: dict[str, int] = {}
    parts: dict[str, float] = {}
    generate_s: float = 0.0
    grade_s: float = 0.0


class GroupsSettled(_OwnerEvent):
    """The owner took note of graded groups: kept, or dropped with the reason."""

    type: ClassVar[str] = "rl.groups.settled"
    groups: tuple[SettledGroup, ...]


class BatchAssembled(_StepEvent):
    """The batch of a step is fixed: groups in slot order (RL), or positions of the shuffled dataset
    (SFT, `rows`). `durable`: the version this step makes must be stored whole."""

    type: ClassVar[str] = "rl.batch.assembled"
    groups: tuple[BatchGroup, ...] = ()
    rows: tuple[int, ...] = ()
    metrics: dict[str, float] = {}
    durable: bool = False


class PolicyUpdated(_PolicyEvent):
    """One optimizer step was taken: version `step` exists. `pinned`: it is stored whole because a
    checkpoint needs it, so its optimizer state is never collected."""

    type: ClassVar[str] = "rl.policy.updated"
    step: int
    state: StateRef
    batch: UUID
    metrics: dict[str, float]
    plan: tuple[int, ...]
    versions: dict[str, str]
    pinned: bool = False


class StepSkipped(_StepEvent):
    """A step left the weights as they were: no group could be used, and version `step` is an alias of
    the one before; or the numbers of its `batch` (the BatchAssembled, kept for inspection) were not
    finite."""

    type: ClassVar[str] = "rl.step.skipped"
    reason: str
    batch: UUID | None = None


class StepSettled(_StepEvent):
    """The run took note of a step: its version, its reward, all its metrics, and what the manifest of
    its checkpoint needs. Step 0 is the start: version 0, and the run's fixed checkpoint files. `at`:
    when, in Unix seconds; for the time split of the next step."""

    type: ClassVar[str] = "rl.step.settled"
    state: StateRef
    metrics: dict[str, float]
    skipped: bool = False
    batch: UUID | None = None
    plan: tuple[int, ...] = ()
    versions: dict[str, str] = {}
    files: dict[str, ArtifactRef] = {}
    weights_name: str | None = None
    at: float | None = None


class RunWarned(_StepEvent):
    """Something a user should look at; the run goes on. `about` sampler: servers that were fenced,
    said once for each message."""

    type: ClassVar[str] = "rl.run.warned"
    message: str
    about: Literal["run", "sampler"] = "run"


class CheckpointRequested(_RunEvent):
    """The run wants the checkpoint of a settled step: on cadence, at a stop, at the end."""

    type: ClassVar[str] = "rl.checkpoint.requested"
    spec: CheckpointSpec
    reward: float | None = None

    @property
    def name(self) -> str:
        return f"{self.type}/{self.spec.step}"


class CheckpointSaved(Event):
    """A checkpoint's manifest is in place; whoever reads it can verify every byte."""

    type: ClassVar[str] = "rl.checkpoint.saved"
    topic: ClassVar[str] = RUN_TOPIC
    spec: CheckpointSpec
    manifest: ArtifactRef
    reward: float | None = None

    @property
    def stream(self) -> StreamName:
        return checkpoint_stream(self.spec.run)

    @property
    def run_id(self) -> str:
        return self.spec.run


class CheckpointFailed(Event):
    """A checkpoint could not be put; the run fails with the last good one named."""

    type: ClassVar[str] = "rl.checkpoint.failed"
    topic: ClassVar[str] = RUN_TOPIC
    run: str
    step: int
    message: str

    @property
    def stream(self) -> StreamName:
        return checkpoint_stream(self.run)

    @property
    def run_id(self) -> str:
        return self.run


class CheckpointSettled(_StepEvent):
    """The run took note of a checkpoint."""

    type: ClassVar[str] = "rl.checkpoint.settled"
    manifest_sha256: Sha256


class _EvaluationEvent(Event):
    topic: ClassVar[str] = RUN_TOPIC
    evaluation: str

    @property
    def stream(self) -> StreamName:
        return eval_stream(self.evaluation)

    @property
    def run_id(self) -> str:
        return self.evaluation


class EvaluationRequested(_EvaluationEvent):
    """An evaluation is wanted: by a user (`config`), or by a run at a step (`run`, `step`), which
    appends it to its own stream. `rows` are the dataset rows, in order."""

    type: ClassVar[str] = "rl.evaluation.requested"
    eval_name: str
    template: GroupTemplate
    rows: tuple[int, ...]
    batch_size: int = 64
    pass_threshold: float = 1.0
    run: str | None = None
    step: int | None = None
    config: EvalConfig | None = None
    workspace: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def stream(self) -> StreamName:
        return run_stream(self.run) if self.run else eval_stream(self.evaluation)

    @property
    def run_id(self) -> str:
        return self.run or self.evaluation

    @property
    def name(self) -> str:
        return f"{self.type}/{self.evaluation}"


class EvaluationStarted(_EvaluationEvent):
    """The evaluation's owner took it up; `template` is complete."""

    type: ClassVar[str] = "rl.evaluation.started"
    template: GroupTemplate
    rows: tuple[int, ...]
    batch_size: int
    pass_threshold: float
    run: str | None = None
    step: int | None = None


class EvaluationCompleted(_EvaluationEvent):
    """An evaluation ended. `reward` is the mean over all graded samples."""

    type: ClassVar[str] = "rl.evaluation.completed"
    gate: ClassVar[Gate | None] = "closed"
    status: Literal["finished", "failed", "stopped"]
    reward: float | None = None
    metrics: dict[str, float] = {}
    message: str | None = None
    run: str | None = None
    step: int | None = None

    @property
    def key(self) -> str:
        return self.run or self.evaluation


class EvaluationStopRequested(_EvaluationEvent):
    """A user asked an evaluation to stop."""

    type: ClassVar[str] = "rl.evaluation.stop-requested"


class EvaluationSettled(_StepEvent):
    """The run took note of its validation at a step."""

    type: ClassVar[str] = "rl.evaluation.settled"
    reward: float | None
    metrics: dict[str, float] = {}


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
    """A user wants a run rebuilt from its log, and every hash compared."""

    type: ClassVar[str] = "rl.verification.requested"


class VerificationCompleted(_VerificationEvent):
    """A verification ended. No findings and no `error`: every version and checkpoint was built again
    and has the hash that the log holds. `error`: it could not be carried out."""

    type: ClassVar[str] = "rl.verification.completed"
    gate: ClassVar[Gate | None] = "closed"
    findings: tuple[Finding, ...] = ()
    steps: int = 0
    checkpoints: int = 0
    artifacts: int = 0
    adapter_sha256: str | None = None
    error: str | None = None


class RunPauseRequested(_RunEvent):
    """A user asked the run to pause at the next step boundary."""

    type: ClassVar[str] = "rl.run.pause-requested"


class RunPaused(_RunEvent):
    """The run rests at a step boundary; its workers are free."""

    type: ClassVar[str] = "rl.run.paused"
    gate: ClassVar[Gate | None] = "paused"
    step: int
    reason: str | None = None


class RunResumeRequested(_RunEvent):
    """A user asked a paused run to go on."""

    type: ClassVar[str] = "rl.run.resume-requested"


class RunResumed(_RunEvent):
    """The run goes on from where it paused."""

    type: ClassVar[str] = "rl.run.resumed"
    gate: ClassVar[Gate | None] = "open"
    step: int


class RunStopRequested(_RunEvent):
    """A user asked the run to stop at the next step boundary, with a final checkpoint."""

    type: ClassVar[str] = "rl.run.stop-requested"


class RunStopped(_RunEvent):
    """The run was stopped by a user; its final checkpoint is saved."""

    type: ClassVar[str] = "rl.run.stopped"
    gate: ClassVar[Gate | None] = "closed"
    step: int


class RunFailed(_RunEvent):
    """The run cannot go on. kind error: its code, data or learning; crash: its processes died."""

    type: ClassVar[str] = "rl.run.failed"
    gate: ClassVar[Gate | None] = "closed"
    kind: Literal["error", "crash"]
    message: str


class RunFinished(_RunEvent):
    """All steps are taken, all checkpoints saved, all validations settled."""

    type: ClassVar[str] = "rl.run.finished"
    gate: ClassVar[Gate | None] = "closed"
    step: int
    reward: float | None = None


class RunRenamed(_RunEvent):
    """A user gave a run another name. Names are labels: ids and everything recorded stay as they are."""

    type: ClassVar[str] = "rl.run.renamed"
    run_name: str


class RunArchived(_RunEvent):
    """An ended run's events and artifacts were moved into `archive`, a file in the blob store; only its
    request and its checkpoints stay in the log. The other fields are where the run ended, so that it can
    still be listed."""

    type: ClassVar[str] = "rl.run.archived"
    gate: ClassVar[Gate | None] = "closed"
    archive: ArtifactRef
    num_events: int
    num_artifacts: int
    run_name: str
    status: str
    phase: str
    commit: str | None = None
    current_step: int | None = None
    total_steps: int | None = None
    reward: float | None = None
    error: str | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None


class RunRestored(_RunEvent):
    """An archived run's events and artifacts were brought back from its archive. Its file is not needed
    any more."""

    type: ClassVar[str] = "rl.run.restored"
    archive_sha256: Sha256
    num_events: int


class RunDeleted(_RunEvent):
    """A user deleted an ended run. Nothing else of it stays in the log; its name is free."""

    type: ClassVar[str] = "rl.run.deleted"
    gate: ClassVar[Gate | None] = "closed"


class MessageDeadLettered(Event):
    """A message that `consumer` could not decide on; nothing else waits for it. `message_id` is the
    event's (for an outcome the effect's), `message_stream` and `message_version` its place in the log.
    `payload` shows its bytes; where that is not all of them, `content` is. `headers` are those it came
    with, `trace` is where the decider failed. `pauses`: its run waits until it is driven again."""

    type: ClassVar[str] = "rl.dead-letter.message"
    topic: ClassVar[str] = DEAD_LETTER_TOPIC
    consumer: str
    message_id: UUID
    message_type: str
    about: str
    cause: str
    payload: str
    headers: dict[str, str] = {}
    traceparent: str | None = None
    message_stream: StreamName = StreamName("")
    message_version: int = 0
    content: ArtifactRef | None = None
    trace: str = ""
    pauses: bool = False

    @property
    def stream(self) -> StreamName:
        return dead_letter_stream(self.consumer)

    @property
    def run_id(self) -> str:
        return self.about

    @property
    def name(self) -> str:
        return f"{self.type}/{self.message_id}"

    @property
    def hold(self) -> Hold | None:
        return "hold" if self.pauses else None


class MessageRedriven(Event):
    """A dead letter is to be delivered again, to the consumer that could not decide on it and to no
    other; its run goes on. `letter` is the MessageDeadLettered event."""

    type: ClassVar[str] = "rl.dead-letter.redriven"
    topic: ClassVar[str] = DEAD_LETTER_TOPIC
    consumer: str
    letter: UUID
    message_id: UUID
    message_stream: StreamName
    message_version: int
    about: str
    paused: bool

    @property
    def stream(self) -> StreamName:
        return dead_letter_stream(self.consumer)

    @property
    def run_id(self) -> str:
        return self.about

    @property
    def name(self) -> str:
        return f"{self.type}/{self.letter}"

    @property
    def hold(self) -> Hold | None:
        return "release" if self.paused else None


ALL_EVENTS: tuple[type[Event], ...] = (
    RepositoryPushed,
    WorkspaceSynced,
    WorkspaceRejected,
    DatasetRegistered,
    DatasetDeleted,
    RunRequested,
    RunRejected,
    RunStarted,
    PolicyInitialized,
    PolicyFailed,
    GroupsRequested,
    SampleGenerated,
    GroupGenerated,
    GroupGraded,
    GroupsSettled,
    BatchAssembled,
    PolicyUpdated,
    StepSkipped,
    StepSettled,
    RunWarned,
    CheckpointRequested,
    CheckpointSaved,
    CheckpointFailed,
    CheckpointSettled,
    EvaluationRequested,
    EvaluationStarted,
    EvaluationCompleted,
    EvaluationStopRequested,
    EvaluationSettled,
    VerificationRequested,
    VerificationCompleted,
    RunPauseRequested,
    RunPaused,
    RunResumeRequested,
    RunResumed,
    RunStopRequested,
    RunStopped,
    RunFailed,
    RunFinished,
    RunRenamed,
    RunArchived,
    RunRestored,
    RunDeleted,
    MessageDeadLettered,
    MessageRedriven,
)

EVENT_TYPES: dict[str, type[Event]] = {event.type: event for event in ALL_EVENTS}
