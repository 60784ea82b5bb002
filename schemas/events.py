"""The catalogue of all events, in the order in which they occur in a run.

Events are facts in the past tense. They are frozen and at most 64 KiB large. Tokens, transcripts
and weights are referenced by an ArtifactRef. Each class states its wire type, its version, its
Kafka topic, and (`gate`) whether it opens, pauses or closes the run that it belongs to. A change
that adds a field with a default keeps the version. Any other change raises it and adds a function
to `schemas/upcasts.py`.
"""

from datetime import datetime
from typing import ClassVar, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from schemas.config import EvalConfig, RunConfig
from schemas.ids import (
    Purpose,
    StreamName,
    checkpoint_stream,
    dataset_stream,
    dead_letter_stream,
    delivery_stream,
    eval_stream,
    grade_stream,
    group_stream,
    policy_stream,
    run_stream,
    status_stream,
    trigger_stream,
    verify_stream,
    workspace_stream,
)
from schemas.sampling import ArtifactRef, Grade, JudgeUsage, ModelRef, Sha256
from schemas.specs import (
    BatchGroup,
    CheckpointSpec,
    CommitSpec,
    CommitStatus,
    DatasetRef,
    DiscoveredRollout,
    Entrypoint,
    Finding,
    GroupSpec,
    GroupTemplate,
    Plan,
    Push,
    PushOrigin,
    RefMove,
    SampleEntry,
    Slot,
    StateRef,
    TrainSpec,
    TriggerMatch,
)

MAX_EVENT_BYTES = 64 * 1024
"""The largest payload an event may have, as JSON."""

Gate = Literal["open", "paused", "closed", "reopened"]
"""A closed gate stays closed, except that `reopened` opens it."""

Hold = Literal["hold", "release"]
Provider = Literal["github", "gitea", "gitlab", "none"]
"""The kind of forge that holds a repository. `none`: a repository without a forge, which posts signed
webhooks in GitHub's form, or is only polled."""

WORKSPACE_TOPIC = "rl.workspace.v1"
RUN_TOPIC = "rl.run.v1"
GROUP_TOPIC = "rl.group.v1"
DEAD_LETTER_TOPIC = "rl.dead-letter.v1"


def _is_none(value: object) -> bool:
    return value is None


class Event(BaseModel):
    """Root of all events.

    `stream` is the stream that the event belongs to. The stream's owner, or an edge, appends it
    there. `key` is the Kafka message key. `run_id` names the run, evaluation or workspace that the
    event is about. `name` distinguishes the events that one cause leads to. The cause and the name
    together give the event its id.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    type: ClassVar[str]
    version: ClassVar[int] = 1
    topic: ClassVar[str]
    gate: ClassVar[Gate | None] = None

    @property
    def hold(self) -> Hold | None:
        """Whether the event holds its run, whatever its gate, until a person corrects something, or
        releases it."""
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
    """A repository may have new commits, or a run needs one of its commits. The event is only a hint:
    sync resolves the branch or commit when it runs. `requester` is the stream that waits for the
    result, if there is one."""

    type: ClassVar[str] = "rl.workspace.pushed"
    workspace_name: str
    commit: CommitSpec
    entrypoints: tuple[Entrypoint, ...] = ()
    requester: StreamName | None = None


class PackagesChosen(_WorkspaceEvent):
    """The exact packages of rollouts of a commit were chosen. They are installed next. `rollouts` are
    those that have packages."""

    type: ClassVar[str] = "rl.workspace.packages-chosen"
    push: UUID
    commit: str
    rollouts: tuple[DiscoveredRollout, ...]
    requester: StreamName | None = None


class WorkspaceSynced(_WorkspaceEvent):
    """A commit was fetched, its snapshot was stored, and its entry points were examined."""

    type: ClassVar[str] = "rl.workspace.synced"
    push: UUID
    commit: str
    snapshot: ArtifactRef
    rollouts: tuple[DiscoveredRollout, ...]
    requester: StreamName | None = None


class WorkspaceRejected(_WorkspaceEvent):
    """A commit could not be fetched, or its files cannot be used. `message` says what to do."""

    type: ClassVar[str] = "rl.workspace.rejected"
    push: UUID
    message: str
    requester: StreamName | None = None


class WorkspaceConnected(_WorkspaceEvent):
    """A person connected the repository to its forge: pushes are followed from here on. The secrets
    are in the table `connections` and never in an event. `hook` is the id of the webhook that was made
    through the forge's API. `can_post` says whether commit statuses can be posted."""

    type: ClassVar[str] = "rl.workspace.connected"
    provider: Provider
    hook: str | None = None
    can_post: bool = False


class WorkspaceDisconnected(_WorkspaceEvent):
    """A person disconnected the repository from its forge: pushes are not followed any more."""

    type: ClassVar[str] = "rl.workspace.disconnected"


class _DeliveryEvent(_WorkspaceEvent):
    @property
    def stream(self) -> StreamName:
        return delivery_stream(self.workspace)


class PushReceived(_DeliveryEvent):
    """The forge delivered a signed webhook about a push. The event is only a hint: sync asks the
    repository itself where its refs are. `delivery` is the forge's id of the delivery. `before` is
    None for a new ref, and `after` for a deleted one."""

    type: ClassVar[str] = "rl.workspace.push-received"
    provider: Provider
    delivery: str
    ref: str
    before: str | None
    after: str | None
    forced: bool = False
    pusher: str | None = None


class HookPinged(_DeliveryEvent):
    """The forge tried its webhook for the first time, and the signature was right."""

    type: ClassVar[str] = "rl.workspace.hook-pinged"
    provider: Provider
    delivery: str


class RefsCheckRequested(_DeliveryEvent):
    """The repository's refs should be listed: a poll found them changed, a person asked for it, or the
    workspace was connected. With `baseline` its refs are only remembered, and start no run."""

    type: ClassVar[str] = "rl.workspace.refs-check-requested"
    reason: Literal["poll", "manual", "connected"]
    baseline: bool = False


class RefsRequested(_WorkspaceEvent):
    """Sync asks the repository for its refs. While one listing is under way, at most one more is
    requested, whatever arrives. So many hints cost few listings, and the last hint is never missed."""

    type: ClassVar[str] = "rl.workspace.refs-requested"
    round: int
    baseline: bool = False

    @property
    def name(self) -> str:
        return f"{self.type}/{self.round}"


class RefsMoved(_WorkspaceEvent):
    """Refs of the repository moved since the last listing. `baseline` means that they are only
    remembered. `part` counts the events of one listing, because one event holds at most 100 moves."""

    type: ClassVar[str] = "rl.workspace.refs-moved"
    workspace_name: str
    url: str
    round: int
    part: int = 0
    moves: tuple[RefMove, ...]
    baseline: bool = False

    @property
    def name(self) -> str:
        return f"{self.type}/{self.round}/{self.part}"

    def pushes(self) -> tuple[Push, ...]:
        """The moves that triggers decide on: refs that exist, and not those of a baseline."""
        if self.baseline:
            return ()
        return tuple(
            Push(
                workspace=self.workspace,
                workspace_name=self.workspace_name,
                url=self.url,
                number=move.number,
                ref=move.ref,
                before=move.before,
                after=move.after,
            )
            for move in self.moves
            if move.after is not None
        )


class RefsListed(_WorkspaceEvent):
    """The repository was asked for its refs, and what moved is recorded. `digest` identifies the whole
    listing. `error` says why the refs could not be listed."""

    type: ClassVar[str] = "rl.workspace.refs-listed"
    round: int
    digest: str | None = None
    num_refs: int = 0
    default_branch: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.type}/{self.round}"


class _TriggerEvent(_WorkspaceEvent):
    @property
    def stream(self) -> StreamName:
        return trigger_stream(self.workspace)


class PushExamined(_TriggerEvent):
    """The `headrace.toml` of a pushed commit was read. `matches` are the triggers that the push
    matched. Without matches, `reason` says why no run follows, or `error` what is wrong with the commit
    or its `headrace.toml`. `day` is the day of the examination, for `max_runs_per_day`."""

    type: ClassVar[str] = "rl.trigger.push-examined"
    push: Push
    matches: tuple[TriggerMatch, ...] = ()
    reason: str | None = None
    error: str | None = None
    day: str

    @property
    def name(self) -> str:
        return f"{self.type}/{self.push.number}"


class _TriggeredEvent(_TriggerEvent):
    """An event about one run of one trigger. `run` is the id that the run has, or would have."""

    run: str
    origin: PushOrigin

    @property
    def name(self) -> str:
        return f"{self.type}/{self.run}"


class TriggerQueued(_TriggeredEvent):
    """The run waits until the run `behind` of the same trigger has ended."""

    type: ClassVar[str] = "rl.trigger.queued"
    behind: str


class TriggerSkipped(_TriggeredEvent):
    """The push matched the trigger, and no run follows, for example because one is running already."""

    type: ClassVar[str] = "rl.trigger.skipped"
    reason: str


class TriggerFired(_TriggeredEvent):
    """The run is to be submitted now. The runs in `supersedes` are to be stopped."""

    type: ClassVar[str] = "rl.trigger.fired"
    supersedes: tuple[str, ...] = ()


class TriggerSubmitted(_TriggeredEvent):
    """The run was submitted."""

    type: ClassVar[str] = "rl.trigger.submitted"
    run_name: str


class TriggerRefused(_TriggeredEvent):
    """The run was refused, for example because its config is not valid. `message` says what to do."""

    type: ClassVar[str] = "rl.trigger.refused"
    message: str


class TriggerSettled(_TriggeredEvent):
    """The run of a trigger has ended, so that the next one in its queue may be submitted."""

    type: ClassVar[str] = "rl.trigger.settled"


class _StatusEvent(Event):
    """An event about the commit status of a run, or of a push that made no run (`subject`). `number`
    counts the statuses of one subject, from 1."""

    topic: ClassVar[str] = WORKSPACE_TOPIC
    workspace: str
    subject: str
    number: int

    @property
    def stream(self) -> StreamName:
        return status_stream(self.subject)

    @property
    def run_id(self) -> str:
        return self.workspace

    @property
    def name(self) -> str:
        return f"{self.type}/{self.number}"


class CommitStatusDecided(_StatusEvent):
    """The commit is to show this status. A status that was not posted yet is replaced by it. `stage`
    orders the statuses of a run: 1 queued, 2 submitted, 3 ended."""

    type: ClassVar[str] = "rl.status.decided"
    stage: int
    status: CommitStatus


class CommitStatusPosted(_StatusEvent):
    """The forge shows the status. `skipped` means that it was not posted, because the workspace is not
    connected, or has no token that may post; `error` is why the forge refused it."""

    type: ClassVar[str] = "rl.status.posted"
    skipped: bool = False
    error: str | None = None


class DatasetRegistered(Event):
    """A dataset was uploaded, validated and stored. `columns` are the names after mapping. `mapping`
    holds the renamed columns: the file's name of each and the name under which it is read.
    `characters` holds the characters of prompts and labels, sorted, the first 512. `workspace` is the
    only one that may use the dataset; None means all."""

    type: ClassVar[str] = "rl.dataset.registered"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    dataset: DatasetRef
    columns: tuple[str, ...]
    file_name: str
    file_size: int
    original: ArtifactRef
    mapping: dict[str, str] = {}
    characters: str = ""
    workspace: str | None = None

    @property
    def stream(self) -> StreamName:
        return dataset_stream(self.dataset.dataset)

    @property
    def run_id(self) -> str:
        return self.dataset.dataset


class DatasetDeleted(Event):
    """A user deleted a dataset. Its registration is removed from the log, and its name can be used
    again."""

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
    """An event that occurs at most once per step."""

    step: int

    @property
    def name(self) -> str:
        return f"{self.type}/{self.step}"


class RunRequested(_RunEvent):
    """A validated request for a run. `workspace` is None when the run needs no user code. `date` is
    the day of the request. Chat templates that ask for the current date get it, unless the config
    names another day. `warnings` lists what is allowed and probably not intended. `origin` is the
    push that started the run, or None. `submitter` owns the personal secrets that the run may use; a
    run that a push started has none. `belongs_to` is the workspace of the token that submitted a run
    without user code."""

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
    origin: PushOrigin | None = None
    submitter: str | None = None
    belongs_to: str | None = None

    @property
    def owner_workspace(self) -> str | None:
        """The workspace whose tokens may see the run; None when only tokens of all workspaces may."""
        return self.workspace or self.belongs_to

    @property
    def needs_approval(self) -> bool:
        """Whether the run waits for RunApproved."""
        return self.origin is not None and self.origin.require_approval

    @property
    def today(self) -> str | None:
        """The current date as the run's chat templates see it."""
        return self.config.advanced.date or self.date


class RunApproved(_RunEvent):
    """A person approved a run that waited for it."""

    type: ClassVar[str] = "rl.run.approved"


class _RunEndEvent(_RunEvent):
    """A run ended. `origin` is the push that started it, or None."""

    origin: PushOrigin | None = None


class RunRejected(_RunEndEvent):
    """The run cannot start, because its commit or entry point lacks something that its config needs."""

    type: ClassVar[str] = "rl.run.rejected"
    gate: ClassVar[Gate | None] = "closed"
    message: str


class RunStarted(_RunEvent):
    """The plan of the run is fixed. `template` is what all of its training groups share, except for
    the policy."""

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
    """Version 0 of the run's policy exists and is stored durably. `metrics` holds what was measured of
    it."""

    type: ClassVar[str] = "rl.policy.initialized"
    spec: TrainSpec
    state: StateRef
    versions: dict[str, str]
    files: dict[str, ArtifactRef] = {}
    weights_name: str = "adapter_model.safetensors"
    metrics: dict[str, float] = {}


class PolicyFailed(_PolicyEvent):
    """The learner could not build the policy or take a step with it. The run cannot continue."""

    type: ClassVar[str] = "rl.policy.failed"
    step: int
    kind: Literal["error", "crash"]
    message: str


class _OwnerEvent(Event):
    """An event about the groups of a step. `owner` is the run or the evaluation whose stream "
    "holds it."""

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
    """The groups of a step are to be generated. The event holds pairs of dataset and row number, and
    never the rows themselves. `owner` is the run or the evaluation."""

    type: ClassVar[str] = "rl.groups.requested"
    slots: tuple[Slot, ...]
    template: GroupTemplate

    @property
    def name(self) -> str:
        first = self.slots[0]
        return f"{self.type}/{self.purpose}/{self.step}/{first.slot}/{first.replacement}"

    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The full specification of each requested group."""
        prefix = f"{self.owner}-{self.purpose}-{self.step}"
        return tuple(
            GroupSpec(
                group=f"{prefix}-{slot.slot}-{slot.replacement}",
                row=slot.row,
                template=self.template,
                attempts=slot.attempts,
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
    """One sample of a group was generated by a user workflow, or it failed (a failure is recorded as
    data). If `artifact` is missing, the workers died or gave up, and `entry` holds all that is known.
    `files` are those that the workflow left behind; their names are in the artifact."""

    type: ClassVar[str] = "rl.sample.generated"
    entry: SampleEntry
    artifact: ArtifactRef | None = None
    seconds: float = 0.0
    files: tuple[ArtifactRef, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.type}/{self.entry.index}"


class GroupGenerated(_GroupEvent):
    """All samples of a group are generated. `parts` hold them in the order of their index. A failed
    sample may be missing there. `seconds` is the time of the slowest sample."""

    type: ClassVar[str] = "rl.group.generated"
    entries: tuple[SampleEntry, ...]
    parts: tuple[ArtifactRef, ...]
    seconds: float = 0.0


class GroupGraded(_GroupEvent):
    """The grader scored a group. `artifact` holds all of its samples. `judgements` holds those of
    judges, if the run has rubrics, and `judged` is the sum of their usage. The event is on
    `rl.run.v1`, because the run decides on it."""

    type: ClassVar[str] = "rl.group.graded"
    topic: ClassVar[str] = RUN_TOPIC
    artifact: ArtifactRef
    entries: tuple[SampleEntry, ...]
    grades: tuple[Grade, ...]
    generate_s: float = 0.0
    grade_s: float = 0.0
    judgements: ArtifactRef | None = Field(default=None, exclude_if=_is_none)
    judged: JudgeUsage | None = Field(default=None, exclude_if=_is_none)

    @property
    def stream(self) -> StreamName:
        return grade_stream(self.spec.group)

    @property
    def key(self) -> str:
        return self.spec.owner


class SettledGroup(BaseModel):
    """A group that is kept for its batch, or dropped with a reason. `version` is the policy version
    that sampled it. `ungraded` counts the samples that were generated and have no reward, by the
    category of the grader's failure. `judged` is the usage of its judges."""

    model_config = ConfigDict(frozen=True)
    group: BatchGroup
    version: int = 0
    entries: tuple[SampleEntry, ...] = ()
    dropped: str | None = None
    ungraded: dict[str, int] = {}
    parts: dict[str, float] = {}
    generate_s: float = 0.0
    grade_s: float = 0.0
    judged: JudgeUsage | None = Field(default=None, exclude_if=_is_none)


class GroupsSettled(_OwnerEvent):
    """The owner has processed graded groups: each is kept, or dropped with a reason."""

    type: ClassVar[str] = "rl.groups.settled"
    groups: tuple[SettledGroup, ...]


class BatchAssembled(_StepEvent):
    """The batch of a step is fixed: groups in the order of their slots (RL), or positions in the
    shuffled dataset (SFT, `rows`). `durable` means that the version that this step makes must be
    stored completely."""

    type: ClassVar[str] = "rl.batch.assembled"
    groups: tuple[BatchGroup, ...] = ()
    rows: tuple[int, ...] = ()
    metrics: dict[str, float] = {}
    durable: bool = False


class PolicyUpdated(_PolicyEvent):
    """The learner took the optimizer step of one batch, so policy version `step` exists. `pinned`
    means that the version is stored completely for a checkpoint, so its optimizer state is never
    deleted."""

    type: ClassVar[str] = "rl.policy.updated"
    step: int
    state: StateRef
    batch: UUID
    metrics: dict[str, float]
    plan: tuple[int, ...]
    versions: dict[str, str]
    pinned: bool = False


class StepSkipped(_StepEvent):
    """A step did not change the weights. Either no group could be used, and version `step` is an alias
    of the version before, or the loss or a gradient was not finite. In the second case `batch` is the
    id of the step's BatchAssembled, so that it can be examined."""

    type: ClassVar[str] = "rl.step.skipped"
    reason: str
    batch: UUID | None = None


class StepSettled(_StepEvent):
    """The run has processed a step. The event records its version, its reward, all of its metrics, and
    what the manifest of its checkpoint needs. Step 0 is the start, with version 0 and the
    checkpoint files that stay the same for the whole run. `at` is the time in Unix seconds, from
    which the next step's time is measured."""

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
    """Something happened that a user should examine. The run continues. When `about` is `sampler`,
    sampling servers were fenced; this is reported once per message."""

    type: ClassVar[str] = "rl.run.warned"
    message: str
    about: Literal["run", "sampler"] = "run"


class CheckpointRequested(_RunEvent):
    """The run asks for the checkpoint of a settled step: at the configured interval, at a stop, or at
    the end."""

    type: ClassVar[str] = "rl.checkpoint.requested"
    spec: CheckpointSpec
    reward: float | None = None

    @property
    def name(self) -> str:
        return f"{self.type}/{self.spec.step}"


class CheckpointSaved(Event):
    """A checkpoint's manifest is written. Readers can verify every byte of the checkpoint with it."""

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
    """A checkpoint could not be stored. The run fails and names its last good checkpoint."""

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
    """The run has processed a saved checkpoint."""

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
    """An evaluation was requested by a user (`config`), or by a run at one of its steps (`run`,
    `step`), which appends the event to its own stream. `rows` are the dataset rows, in order.
    `submitter` owns the personal secrets that it may use."""

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
    submitter: str | None = None

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
    """The evaluation's owner started it. `template` is complete."""

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


class EvaluationRetryRequested(_EvaluationEvent):
    """A user asked to repeat the attempts of an ended evaluation that have no reward. `number` counts
    its retries, from 1."""

    type: ClassVar[str] = "rl.evaluation.retry-requested"
    gate: ClassVar[Gate | None] = "reopened"
    number: int = Field(ge=1)

    @property
    def name(self) -> str:
        return f"{self.type}/{self.number}"


class EvaluationSettled(_StepEvent):
    """The run has processed the validation of a step."""

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
    """A user asked to rebuild a run from its log and to compare every hash."""

    type: ClassVar[str] = "rl.verification.requested"


class VerificationCompleted(_VerificationEvent):
    """A verification ended. Without findings and without an `error`, every version and checkpoint was
    rebuilt and has the hash that the log holds. `error` means that the verification could not be
    carried out."""

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
    """The run is paused at a step boundary, and its workers are free."""

    type: ClassVar[str] = "rl.run.paused"
    gate: ClassVar[Gate | None] = "paused"
    step: int
    reason: str | None = None


class RunResumeRequested(_RunEvent):
    """A user asked a paused run to continue."""

    type: ClassVar[str] = "rl.run.resume-requested"


class RunResumed(_RunEvent):
    """The run continues from where it paused."""

    type: ClassVar[str] = "rl.run.resumed"
    gate: ClassVar[Gate | None] = "open"
    step: int


class RunStopRequested(_RunEvent):
    """A user asked the run to stop at the next step boundary, with a final checkpoint."""

    type: ClassVar[str] = "rl.run.stop-requested"


class RunStopped(_RunEndEvent):
    """A user stopped the run. Its final checkpoint is saved."""

    type: ClassVar[str] = "rl.run.stopped"
    gate: ClassVar[Gate | None] = "closed"
    step: int


class RunFailed(_RunEndEvent):
    """The run cannot continue. `kind` is `error` when its code, data or learning failed, and `crash`
    when its processes died."""

    type: ClassVar[str] = "rl.run.failed"
    gate: ClassVar[Gate | None] = "closed"
    kind: Literal["error", "crash"]
    message: str


class RunFinished(_RunEndEvent):
    """All steps are taken, all checkpoints are saved and all validations are settled. `held_out` is the
    mean reward of the first and of the last validation, if there were two."""

    type: ClassVar[str] = "rl.run.finished"
    gate: ClassVar[Gate | None] = "closed"
    step: int
    reward: float | None = None
    held_out: tuple[float, float] | None = None


class RunRenamed(_RunEvent):
    """A user gave a run another name. Names are labels: ids and everything that was recorded stay the
    same."""

    type: ClassVar[str] = "rl.run.renamed"
    run_name: str


class RunArchived(_RunEvent):
    """An ended run's events and artifacts were moved into `archive`, a file in the blob store. Only
    the run's request and its checkpoints stay in the log. The other fields record the state in
    which the run ended, so that it can still be listed."""

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
    """An archived run's events and artifacts were restored from its archive. The archive file is no
    longer needed."""

    type: ClassVar[str] = "rl.run.restored"
    archive_sha256: Sha256
    num_events: int


class RunDeleted(_RunEvent):
    """A user deleted an ended run. Nothing else of it stays in the log, and its name can be used
    again."""

    type: ClassVar[str] = "rl.run.deleted"
    gate: ClassVar[Gate | None] = "closed"


class MessageDeadLettered(Event):
    """A message that `consumer` could not process was put aside. No other message waits for it.
    `message_id` is the id of the event (for an outcome, of the effect). `message_stream` and
    `message_version` are its place in the log. `payload` shows its bytes; if they are too long,
    `content` holds all of them. `headers` are the message's headers, and `trace` is the traceback of the
    failure. `pauses` means that its run waits until the message is delivered again."""

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
    """A dead letter is delivered again, only to the consumer that failed on it. Its run continues.
    `letter` is the id of the MessageDeadLettered event."""

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
    PackagesChosen,
    WorkspaceSynced,
    WorkspaceRejected,
    WorkspaceConnected,
    WorkspaceDisconnected,
    PushReceived,
    HookPinged,
    RefsCheckRequested,
    RefsRequested,
    RefsMoved,
    RefsListed,
    PushExamined,
    TriggerQueued,
    TriggerSkipped,
    TriggerFired,
    TriggerSubmitted,
    TriggerRefused,
    TriggerSettled,
    CommitStatusDecided,
    CommitStatusPosted,
    DatasetRegistered,
    DatasetDeleted,
    RunRequested,
    RunApproved,
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
    EvaluationRetryRequested,
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
