"""Events of the steps of a run, and of the policy that they update."""

from typing import ClassVar, Literal
from uuid import UUID

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.costs.work import Spent, Work
from schemas.events.event import RUN_TOPIC, Event
from schemas.events.runs import BaseStepEvent
from schemas.ids import StreamName, policy_stream
from schemas.learner import RefutingTest
from schemas.models.fork import EarlierWeights, ForkedPolicy
from schemas.sampling import PolicyRef
from schemas.specs import BatchGroup, StateRef, TrainSpec


def _is_none(value: object) -> bool:
    return value is None


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
    """The first version of the run's policy exists and is stored durably: version 0, or in a fork the
    version of the parent that it begins with. `metrics` holds what was measured of it."""

    type: ClassVar[str] = "rl.policy.initialized"
    spec: TrainSpec
    state: StateRef
    versions: dict[str, str]
    files: dict[str, ArtifactRef] = {}
    weights_name: str = "adapter_model.safetensors"
    metrics: dict[str, float] = {}
    fork: ForkedPolicy | None = Field(default=None, exclude_if=lambda value: value is None)
    work: Work | None = Field(default=None, exclude_if=_is_none)


class PolicyFailed(_PolicyEvent):
    """The learner could not build the policy or take a step with it. The run cannot continue."""

    type: ClassVar[str] = "rl.policy.failed"
    step: int
    kind: Literal["error", "crash"]
    message: str
    work: Work | None = Field(default=None, exclude_if=_is_none)


class SampleRefuted(_PolicyEvent):
    """A sample does not come from the policy version that the log names, so its step was not taken. The
    groups in all `slots` of the batch with such samples, which came from `servers`, are generated again.
    The `test` reached its level after `tokens` tokens, and its e-value was at most e to the power of
    `log_e`. `distance` is the mean absolute difference of the logprobs, in nats. `neighbours` are the
    first other samples that the server made for this batch. `attempt` counts the batches of this step
    that were refused. Only the first refuted samples of a batch have an event; `others` counts the
    rest."""

    type: ClassVar[str] = "rl.sample.refuted"
    step: int
    batch: UUID
    sample: str
    server: str
    servers: tuple[str, ...]
    policy_version: int
    test: RefutingTest
    tokens: int
    log_e: float
    distance: float
    neighbours: tuple[str, ...] = ()
    slots: tuple[int, ...]
    attempt: int
    others: int = 0

    @property
    def name(self) -> str:
        return f"{self.type}/{self.sample}"


class PoolsDecided(BaseStepEvent):
    """The pools of a run with a curriculum are decided for a step, before its groups are requested, from
    the groups of the steps up to `measured_up_to`. `easy` and `hard` are the rows that go to these
    pools, and `left` are those that leave their pool. `position` is how many places of the shuffled
    dataset are visited with the rows of this step. The other numbers count the rows in each pool and in
    none."""

    type: ClassVar[str] = "rl.pools.decided"
    measured_up_to: int
    position: int
    easy: tuple[int, ...] = ()
    hard: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    num_easy: int
    num_hard: int
    num_normal: int


class BatchAssembled(BaseStepEvent):
    """The batch of a step is fixed: groups in the order of their slots (RL), or positions in the
    shuffled dataset (`rows`, where nothing is sampled). `durable` means that the version that this step
    makes must be stored completely. `sampled` is the version that made the samples, in runs that test
    them."""

    type: ClassVar[str] = "rl.batch.assembled"
    groups: tuple[BatchGroup, ...] = ()
    rows: tuple[int, ...] = ()
    metrics: dict[str, float] = {}
    durable: bool = False
    sampled: PolicyRef | None = Field(default=None, exclude_if=lambda value: value is None)


class PolicyUpdated(_PolicyEvent):
    """The learner took the optimizer step of one batch, so policy version `step` exists. `pinned`
    means that the version is stored completely for good: for a checkpoint, or because its bits diverge.
    `fork` says how the version that the step started from was rebuilt with other bits than those of the
    log (`advanced.allow_divergence`). Later versions follow from this one."""

    type: ClassVar[str] = "rl.policy.updated"
    step: int
    state: StateRef
    batch: UUID
    metrics: dict[str, float]
    plan: tuple[int, ...]
    versions: dict[str, str]
    pinned: bool = False
    fork: str | None = Field(default=None, exclude_if=lambda value: value is None)
    work: Work | None = Field(default=None, exclude_if=_is_none)


class StepSkipped(BaseStepEvent):
    """A step did not change the weights. Either no group could be used, and version `step` is an alias
    of the version before, or the loss or a gradient was not finite. In the second case `batch` is the
    id of the step's BatchAssembled, so that it can be examined."""

    type: ClassVar[str] = "rl.step.skipped"
    reason: str
    batch: UUID | None = None


class StepSettled(BaseStepEvent):
    """The run has processed a step. The event records its version, its reward, all of its metrics, and
    what the manifest of its checkpoint needs. Step 0 is the start, with version 0 and the
    checkpoint files that stay the same for the whole run; a fork starts with the step of its parent
    instead. `weights` are those of earlier versions, which groups of a fork sample with. `at` is the
    time in Unix seconds, from which the next step's time is measured. `spent` is what the learner took
    of devices."""

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
    weights: tuple[EarlierWeights, ...] = Field(default=(), exclude_if=lambda value: not value)
    spent: Spent = Field(default={}, exclude_if=lambda value: value == {})


class RunWarned(BaseStepEvent):
    """Something happened that a user should examine. The run continues. When `about` is `sampler`,
    sampling servers were fenced; this is reported once per message. When it is `failures`, too many
    samples failed; this is reported once per category of the most frequent failure. When it is `fork`,
    the step started from other bits than those of the log. When it is `pools`, too few rows (`category`
    is `few`) or none at all (`none`) are outside of the pools of a curriculum; each is reported once.
    When it is `refuted`, samples of the server `category` were refuted; this is reported at most three
    times per server, and then it is fenced. A step may have one warning of each kind, and one about each
    server."""

    type: ClassVar[str] = "rl.run.warned"
    message: str
    about: Literal["run", "sampler", "failures", "fork", "pools", "refuted"] = "run"
    category: str | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def name(self) -> str:
        if self.about == "refuted":
            return f"{super().name}/{self.about}/{self.category}"
        return super().name if self.about == "run" else f"{super().name}/{self.about}"
