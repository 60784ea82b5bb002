"""Events of evaluations, and of the validations of a run."""

from datetime import datetime
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.artifact_refs import ArtifactRef
from schemas.config import EvalConfig
from schemas.costs.work import Spent
from schemas.events.event import RUN_TOPIC, Event, Gate
from schemas.events.runs import BaseStepEvent
from schemas.ids import StreamName, eval_stream, run_stream
from schemas.sampling import Grade
from schemas.specs import DatasetRef, GroupTemplate


def _is_none(value: object) -> bool:
    return value is None


def _is_empty(value: object) -> bool:
    return value == {}


def _is_zero(value: object) -> bool:
    return value == 0


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
    `submitter` owns the personal secrets that it may use. `decider` is the version
    of the rules by which it is decided; a validation has that of its run."""

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
    decider: int = 1

    @property
    def needed_decider(self) -> int:
        return self.decider

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
    decider: int = 1

    @property
    def needed_decider(self) -> int:
        return self.decider


class EvaluationCompleted(_EvaluationEvent):
    """An evaluation ended. `reward` is the mean over all graded samples. `ended_at` is the time of an
    imported one, which ended elsewhere before it was recorded here. `spent` is what its samples took of
    devices, and `usd` is what judges and providers cost, with those of all its retries."""

    type: ClassVar[str] = "rl.evaluation.completed"
    gate: ClassVar[Gate | None] = "closed"
    status: Literal["finished", "failed", "stopped"]
    reward: float | None = None
    metrics: dict[str, float] = {}
    message: str | None = None
    run: str | None = None
    step: int | None = None
    ended_at: datetime | None = Field(default=None, exclude_if=_is_none)
    spent: Spent = Field(default={}, exclude_if=_is_empty)
    usd: float = Field(default=0.0, exclude_if=_is_zero)

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


class LocalRun(BaseModel):
    """Where an imported evaluation was made, as its importer says: the id and the name of the run there,
    the SHA-256 of its manifest and of its code, and what else it recorded, such as `config_path`."""

    model_config = ConfigDict(frozen=True)
    id: str
    name: str
    manifest_sha256: str
    code_digest: str
    provenance: dict[str, str | bool] = {}


class ImportedRow(BaseModel):
    """The attempts at a dataset row of an imported evaluation. `artifact` is their SampleBatch, and
    `files` are the files that it names. `attempts` are the numbers of the attempts with these grades."""

    model_config = ConfigDict(frozen=True)
    slot: int = Field(ge=0)
    row: int = Field(ge=0)
    artifact: ArtifactRef
    grades: tuple[Grade, ...] = ()
    attempts: tuple[int, ...] = ()
    files: tuple[ArtifactRef, ...] = ()


class _ImportEvent(_EvaluationEvent):
    """An event of import `number` of an evaluation; later ones replace its results."""

    number: int = Field(ge=1)


class EvaluationImported(_ImportEvent):
    """The results of an evaluation that ran elsewhere were imported by `importer`. Headrace neither
    sampled nor graded them. `content_sha256` identifies the manifest and all files, `rows` counts the
    dataset rows, and `tokens` those of all attempts."""

    type: ClassVar[str] = "rl.evaluation.imported"
    eval_name: str
    workspace: str
    local_run: LocalRun
    content_sha256: str
    dataset: DatasetRef
    config: EvalConfig
    rows: int
    tokens: int
    started_at: datetime
    logs: ArtifactRef | None = None
    importer: str | None = None

    @property
    def run(self) -> None:
        """No run requested it."""

    @property
    def submitter(self) -> None:
        """It uses no secrets."""

    @property
    def name(self) -> str:
        return f"{self.type}/{self.number}"


class EvaluationRowsImported(_ImportEvent):
    """A page of the rows of an imported evaluation, counted from 0."""

    type: ClassVar[str] = "rl.evaluation.rows-imported"
    page: int = Field(ge=0)
    rows: tuple[ImportedRow, ...]

    @property
    def name(self) -> str:
        return f"{self.type}/{self.number}/{self.page}"


class EvaluationSettled(BaseStepEvent):
    """The run has processed the validation of a step. `spent` and `usd` are those of the validation."""

    type: ClassVar[str] = "rl.evaluation.settled"
    reward: float | None
    metrics: dict[str, float] = {}
    spent: Spent = Field(default={}, exclude_if=_is_empty)
    usd: float = Field(default=0.0, exclude_if=_is_zero)
