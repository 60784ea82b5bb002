"""Events of regrades, which grade the recorded samples of a run again.

They belong to the run: its log shows them, its archive has them, and they are deleted with it.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.artifact_refs import ArtifactRef
from schemas.config import RunConfig
from schemas.events.event import RUN_TOPIC, Event
from schemas.events.regrades.figures import Disagreement, RegradeReport, RegradeSums
from schemas.ids import StreamName, gradients_stream, regrade_stream
from schemas.specs import RolloutRef, RubricSpec

RegradeSource = Literal["commit", "working tree", "rubrics", "weights"]
"""Where the new grades come from: the grader of a commit or of a working tree, judges with other
rubrics, or other weights of the parts that were recorded."""


class _RegradeEvent(Event):
    topic: ClassVar[str] = RUN_TOPIC
    regrade: str
    run: str

    @property
    def stream(self) -> StreamName:
        return regrade_stream(self.regrade)

    @property
    def run_id(self) -> str:
        return self.run


class RegradeRequested(_RegradeEvent):
    """A user asked to grade the recorded samples of a run again. `base` is the regrade whose grades are
    those before; None means the recorded ones. `rollout` is the one that made them, and `base_weight`
    the weight that its Grader's own reward has in them. With a `config` the grader of another commit of
    `workspace` is used, and `commit` is how the user named it. `rubrics` replace those of the run, and
    judges are asked about them. `weights` are those of parts by name. `steps` are the first and the
    last step, `share` is the share of groups, and a reward of `threshold` passes. With
    `compares_groups` the run's algorithm compares the rewards of a group. `submitter` owns the personal
    secrets that it may use, and `requester` is the person."""

    type: ClassVar[str] = "rl.regrade.requested"
    source: RegradeSource
    rollout: RolloutRef
    base: str | None = None
    base_weight: float = 1.0
    config: RunConfig | None = None
    workspace: str | None = None
    commit: str | None = None
    rubrics: tuple[RubricSpec, ...] = ()
    weights: dict[str, float] = {}
    steps: tuple[int, int] | None = None
    share: float = Field(default=1.0, gt=0, le=1)
    threshold: float = 1.0
    compares_groups: bool = True
    gradients: bool = False
    submitter: str | None = None
    requester: str | None = None


class RegradeStarted(_RegradeEvent):
    """The code and the weights of a regrade are fixed. `rollout` has the new grader."""

    type: ClassVar[str] = "rl.regrade.started"
    rollout: RolloutRef


class UngradedSample(BaseModel):
    """A sample that the new grading gave no reward, and why."""

    model_config = ConfigDict(frozen=True)
    sample: str
    step: int
    before: float | None
    category: str
    message: str


class RegradePartGraded(_RegradeEvent):
    """A part of the recorded groups was graded again. `number` counts the parts, from 1. `artifact`
    holds the grades (RegradedGroups). `by_step` has the sums of each step. `worst` are the largest
    disagreements of the part, and `ungraded` its first samples without a new reward, which
    `failures` counts by category. `following` is the place in the log where the next part begins; None
    after the last one."""

    type: ClassVar[str] = "rl.regrade.part-graded"
    number: int = Field(ge=1)
    artifact: ArtifactRef
    by_step: dict[int, RegradeSums] = {}
    worst: tuple[Disagreement, ...] = ()
    ungraded: tuple[UngradedSample, ...] = ()
    failures: dict[str, int] = {}
    following: str | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.type}/{self.number}"


class RegradeCompleted(_RegradeEvent):
    """A regrade ended, and `report` has its figures over all steps. If it failed, `message` says why,
    and the report covers the parts that were graded before. With `gradients` those are compared next."""

    type: ClassVar[str] = "rl.regrade.completed"
    status: Literal["finished", "failed"]
    report: RegradeReport | None = None
    worst: tuple[Disagreement, ...] = ()
    ungraded: tuple[UngradedSample, ...] = ()
    failures: dict[str, int] = {}
    parts: int = 0
    seconds: float = 0.0
    message: str | None = None
    gradients: bool = False


class _GradientsEvent(_RegradeEvent):
    @property
    def stream(self) -> StreamName:
        return gradients_stream(self.regrade)


class GradientsCompared(_GradientsEvent):
    """The policy gradients of a step were computed with the rewards before and after, from the version
    that the step started from and its recorded batch. `cosine` is None if one of them is 0. `turned` of
    `advantages` samples have an advantage of another sign. `groups` were compared, and `missing` groups
    of the batch are not in the regrade."""

    type: ClassVar[str] = "rl.gradients.compared"
    step: int
    cosine: float | None
    norm_before: float
    norm_after: float
    advantages: int
    turned: int
    groups: int
    missing: int = 0

    @property
    def name(self) -> str:
        return f"{self.type}/{self.step}"


class GradientComparisonCompleted(_GradientsEvent):
    """The gradients of all steps are compared, or cannot be (`message`)."""

    type: ClassVar[str] = "rl.gradients.completed"
    steps: int = 0
    message: str | None = None
