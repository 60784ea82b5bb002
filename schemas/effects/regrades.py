"""Effects of regrades, and their outcomes."""

from dataclasses import dataclass, field
from typing import ClassVar

from schemas.artifact_refs import ArtifactRef
from schemas.effects.effect import Effect, Lane, Outcome
from schemas.events.regrades.events import RegradeRequested, UngradedSample
from schemas.events.regrades.figures import Disagreement, RegradeSums
from schemas.specs import RolloutRef


class RegradeGroups(Effect):
    """Grade a part of the recorded groups of a run again: those from `after` on, a place in the log.
    The effect belongs to the regrade, so that a closed run can be regraded."""

    type: ClassVar[str] = "RegradeGroups"
    lane: ClassVar[Lane] = Lane.USER
    regrade: str
    run: str
    number: int
    after: str
    request: RegradeRequested
    rollout: RolloutRef

    @property
    def key(self) -> str:
        return f"{self.regrade}/{self.number}"

    @property
    def run_id(self) -> str:
        return self.regrade


class CompareGradients(Effect):
    """Compute the policy gradients of the first step after `after` of a regraded run, with the rewards
    before and after."""

    type: ClassVar[str] = "CompareGradients"
    lane: ClassVar[Lane] = Lane.TRAIN
    regrade: str
    run: str
    after: int

    @property
    def key(self) -> str:
        return f"{self.regrade}/{self.after}"

    @property
    def run_id(self) -> str:
        return self.regrade


@dataclass(frozen=True, slots=True)
class GroupsRegraded(Outcome):
    """The new grades of a part (see `RegradePartGraded`)."""

    effect: RegradeGroups
    artifact: ArtifactRef
    by_step: dict[int, RegradeSums]
    worst: tuple[Disagreement, ...] = ()
    ungraded: tuple[UngradedSample, ...] = ()
    failures: dict[str, int] = field(default_factory=dict)
    following: str | None = None


@dataclass(frozen=True, slots=True)
class StepGradients(Outcome):
    """The comparison of a step (see `GradientsCompared`); `step` is None if there is no further one."""

    effect: CompareGradients
    step: int | None = None
    cosine: float | None = None
    norm_before: float = 0.0
    norm_after: float = 0.0
    advantages: int = 0
    turned: int = 0
    groups: int = 0
    missing: int = 0
