"""Events of evaluations, and of the validations of a run."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config import EvalConfig
from schemas.events.event import RUN_TOPIC, Event, Gate
from schemas.events.runs import BaseStepEvent
from schemas.ids import StreamName, eval_stream, run_stream
from schemas.specs import GroupTemplate


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


class EvaluationSettled(BaseStepEvent):
    """The run has processed the validation of a step."""

    type: ClassVar[str] = "rl.evaluation.settled"
    reward: float | None
    metrics: dict[str, float] = {}
