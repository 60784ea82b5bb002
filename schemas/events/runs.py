"""Events of a run as a whole: how it begins, what users ask of it, and how it ends."""

from datetime import datetime
from typing import ClassVar, Literal

from pydantic import Field

from schemas.artifact_refs import ArtifactRef, Sha256
from schemas.config import RunConfig
from schemas.costs.archived import ArchivedCost
from schemas.costs.budget import Budget
from schemas.costs.prices import Prices
from schemas.events.event import RUN_TOPIC, Event, Gate
from schemas.ids import StreamName, run_stream
from schemas.models.fork import ForkPoint
from schemas.models.reward_model import RewardModelSpec
from schemas.models.teacher import TeacherRef
from schemas.sampling import ModelRef
from schemas.specs import (
    DatasetRef,
    GroupTemplate,
    Plan,
    PushOrigin,
    StateRef,
    TrainSpec,
)


class BaseRunEvent(Event):
    """An event of a run."""

    topic: ClassVar[str] = RUN_TOPIC
    run: str

    @property
    def stream(self) -> StreamName:
        return run_stream(self.run)

    @property
    def run_id(self) -> str:
        return self.run


class BaseStepEvent(BaseRunEvent):
    """An event that occurs at most once per step."""

    step: int

    @property
    def name(self) -> str:
        return f"{self.type}/{self.step}"


class RunRequested(BaseRunEvent):
    """A validated request for a run. `workspace` is None when the run needs no user code. `date` is
    the day of the request. Chat templates that ask for the current date get it, unless the config
    names another day. `warnings` lists what is allowed and probably not intended. `origin` is the
    push that started the run, or None. `submitter` owns the personal secrets that the run may use;
    a run that a push or an API key of a workspace started has none. `creator` is the owner of the
    key that submitted the run, whom lists show. `belongs_to` is the workspace of the key that
    submitted a run without user code. `reward_models` are those that score its samples. `decider` is
    the version of the rules by which it is decided (`schemas/events/decider_version.py`). `teacher` is
    the model that the run learns from, if it distils. `fork` is where the run begins, if it is a fork of
    another one. Its state is then the fold of the parent's stream up to there. `prices` are those by
    which its budget counts."""

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
    creator: str | None = None
    belongs_to: str | None = None
    reward_models: tuple[RewardModelSpec, ...] = Field(
        default=(), exclude_if=lambda value: not value
    )
    decider: int = 1
    teacher: TeacherRef | None = Field(default=None, exclude_if=lambda value: value is None)
    fork: ForkPoint | None = Field(default=None, exclude_if=lambda value: value is None)
    prices: Prices | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def owner_workspace(self) -> str | None:
        """The workspace whose API keys may see the run; None when only keys of all workspaces may."""
        return self.workspace or self.belongs_to

    @property
    def weight(self) -> int | None:
        priority = self.config.advanced.priority
        return priority if priority != 1 else None

    @property
    def needed_decider(self) -> int:
        return self.decider

    @property
    def needs_approval(self) -> bool:
        """Whether the run waits for RunApproved."""
        return self.origin is not None and self.origin.require_approval

    @property
    def today(self) -> str | None:
        """The current date as the run's chat templates see it."""
        return self.config.advanced.date or self.date


class RunApproved(BaseRunEvent):
    """A person approved a run that waited for it."""

    type: ClassVar[str] = "rl.run.approved"


class _RunEndEvent(BaseRunEvent):
    """A run ended. `origin` is the push that started it, or None."""

    origin: PushOrigin | None = None


class RunRejected(_RunEndEvent):
    """The run cannot start, because its commit or entry point lacks something that its config needs."""

    type: ClassVar[str] = "rl.run.rejected"
    gate: ClassVar[Gate | None] = "closed"
    message: str


class RunStarted(BaseRunEvent):
    """The plan of the run is fixed. `template` is what all of its training groups share, except for
    the policy. `fork` is that of its request."""

    type: ClassVar[str] = "rl.run.started"
    gate: ClassVar[Gate | None] = "open"
    plan: Plan
    spec: TrainSpec
    template: GroupTemplate | None = None
    validation: GroupTemplate | None = None
    commit: str | None = None
    fork: ForkPoint | None = Field(default=None, exclude_if=lambda value: value is None)


class RunPauseRequested(BaseRunEvent):
    """A user asked the run to pause at the next step boundary."""

    type: ClassVar[str] = "rl.run.pause-requested"


class BudgetExhausted(BaseStepEvent):
    """The run pauses before the step after `step`, because that would pass its budget. `limit` is the
    name of the limit, `most` its value, `used` what was used until now, and `estimate` what the next
    step and the validations beside it are expected to use."""

    type: ClassVar[str] = "rl.run.budget-exhausted"
    limit: Literal["max_cost", "max_tokens", "max_hours"]
    most: float
    used: float
    estimate: float


class RunPaused(BaseRunEvent):
    """The run is paused at a step boundary, and its workers are free."""

    type: ClassVar[str] = "rl.run.paused"
    gate: ClassVar[Gate | None] = "paused"
    step: int
    reason: str | None = None


class RunResumeRequested(BaseRunEvent):
    """A user asked a paused run to continue. `budget` has the limits that are raised."""

    type: ClassVar[str] = "rl.run.resume-requested"
    budget: Budget | None = Field(default=None, exclude_if=lambda value: value is None)


class RunResumed(BaseRunEvent):
    """The run continues from where it paused."""

    type: ClassVar[str] = "rl.run.resumed"
    gate: ClassVar[Gate | None] = "open"
    step: int


class RunStopRequested(BaseRunEvent):
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
    mean reward of the first and of the last validation, if there were two, and `held_out_intervals` are
    their 95 % intervals. `deploy_as` is the name under which its best checkpoint is to be deployed, if
    the config asks for it."""

    type: ClassVar[str] = "rl.run.finished"
    gate: ClassVar[Gate | None] = "closed"
    step: int
    reward: float | None = None
    held_out: tuple[float, float] | None = None
    held_out_intervals: tuple[tuple[float, float], tuple[float, float]] | None = None
    deploy_as: str | None = None


class RunRenamed(BaseRunEvent):
    """A user gave a run another name. Names are labels: ids and everything that was recorded stay the
    same."""

    type: ClassVar[str] = "rl.run.renamed"
    run_name: str


class RunArchived(BaseRunEvent):
    """An ended run's events and artifacts were moved into `archive`, a file in the blob store. Only
    the run's request and its checkpoints stay in the log. The other fields record the state in
    which the run ended, so that it can still be listed. `costs` are the sums of its cost ledger."""

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
    costs: tuple[ArchivedCost, ...] = Field(default=(), exclude_if=lambda value: value == ())


class RunRestored(BaseRunEvent):
    """An archived run's events and artifacts were restored from its archive. The archive file is no
    longer needed."""

    type: ClassVar[str] = "rl.run.restored"
    archive_sha256: Sha256
    num_events: int


class RunDeleted(BaseRunEvent):
    """A user deleted an ended run. Nothing else of it stays in the log, and its name can be used
    again."""

    type: ClassVar[str] = "rl.run.deleted"
    gate: ClassVar[Gate | None] = "closed"
