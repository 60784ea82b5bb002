"""The catalogue of all effects and outcomes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar
from uuid import UUID

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.costs.work import Spent
from schemas.deployments import HubUpload, ServedModel, deployment_id, deployment_key
from schemas.effects.effect import Effect as Effect
from schemas.effects.effect import Failed as Failed
from schemas.effects.effect import Lane as Lane
from schemas.effects.effect import Outcome as Outcome
from schemas.effects.regrades import CompareGradients as CompareGradients
from schemas.effects.regrades import GroupsRegraded as GroupsRegraded
from schemas.effects.regrades import RegradeGroups as RegradeGroups
from schemas.effects.regrades import StepGradients as StepGradients
from schemas.learner import Refutation
from schemas.models.fork import ForkedPolicy, ForkPoint
from schemas.sampling import Grade, JudgeUsage, PolicyRef
from schemas.specs import (
    BatchGroup,
    CheckpointSpec,
    CommitSpec,
    CommitStatus,
    DiscoveredRollout,
    Entrypoint,
    Finding,
    GroupSpec,
    Push,
    PushOrigin,
    SampleEntry,
    StateRef,
    TrainSpec,
    TriggerMatch,
)


class _OfCommitRequest(Effect):
    """A part of the answer to the CommitRequested whose id is `request`. `requester` is the stream that
    waits for it, if there is one."""

    lane: ClassVar[Lane] = Lane.CONTROL
    workspace: str
    request: UUID
    commit: CommitSpec
    requester: str | None = None

    @property
    def key(self) -> str:
        return f"{self.workspace}/{self.request}"

    @property
    def run_id(self) -> str:
        return self.requester.partition("-")[2] if self.requester else self.workspace


class FetchCommit(_OfCommitRequest):
    """Fetch a commit, store its snapshot, and choose the packages of its rollouts. If there are none,
    discover what its entry points define."""

    type: ClassVar[str] = "FetchCommit"
    entrypoints: tuple[Entrypoint, ...]


class DiscoverRollouts(_OfCommitRequest):
    """Install the chosen packages of a commit, and discover what its entry points define. `rollouts`
    have their packages, or the reason why they cannot have them."""

    type: ClassVar[str] = "DiscoverRollouts"
    sha: str
    snapshot: ArtifactRef
    rollouts: tuple[DiscoveredRollout, ...]


class ListRefs(Effect):
    """Ask a workspace's repository for its branches and tags."""

    type: ClassVar[str] = "ListRefs"
    lane: ClassVar[Lane] = Lane.CONTROL
    workspace: str
    url: str
    round: int

    @property
    def key(self) -> str:
        return f"{self.workspace}/{self.round}"

    @property
    def run_id(self) -> str:
        return self.workspace


class ExaminePush(Effect):
    """Read the `headrace.toml` of a pushed commit, and find the triggers that the push matches."""

    type: ClassVar[str] = "ExaminePush"
    lane: ClassVar[Lane] = Lane.CONTROL
    push: Push

    @property
    def key(self) -> str:
        return self.push.id

    @property
    def run_id(self) -> str:
        return self.push.workspace


class SubmitRun(Effect):
    """Submit the run of a push and a trigger, as `train submit` does."""

    type: ClassVar[str] = "SubmitRun"
    lane: ClassVar[Lane] = Lane.SUBMIT
    origin: PushOrigin

    @property
    def key(self) -> str:
        return self.origin.key

    @property
    def run_id(self) -> str:
        return self.origin.push.workspace


class PostStatus(Effect):
    """Show a status on a commit, through the API of its forge. `number` counts those of `subject`."""

    type: ClassVar[str] = "PostStatus"
    lane: ClassVar[Lane] = Lane.CONTROL
    subject: str
    number: int
    status: CommitStatus

    @property
    def key(self) -> str:
        return f"{self.subject}/{self.number}"

    @property
    def run_id(self) -> str:
        return self.status.workspace


class InitializePolicy(Effect):
    """Build version 0 of a run's policy, or the version of the parent that a fork begins with."""

    type: ClassVar[str] = "InitializePolicy"
    lane: ClassVar[Lane] = Lane.TRAIN
    spec: TrainSpec
    fork: ForkPoint | None = Field(default=None, exclude_if=lambda fork: fork is None)

    @property
    def run_id(self) -> str:
        return self.spec.run


class _OfGroup(Effect):
    """A part of the work on a group of samples."""

    spec: GroupSpec

    @property
    def key(self) -> str:
        return self.spec.group

    @property
    def run_id(self) -> str:
        return self.spec.owner


class GenerateGroup(_OfGroup):
    """Sample a whole group with one turn per sample and without a user workflow."""

    type: ClassVar[str] = "GenerateGroup"
    lane: ClassVar[Lane] = Lane.GENERATE

    @property
    def size(self) -> int:
        return self.spec.template.num_samples


class GenerateSample(_OfGroup):
    """Run the user's workflow once, for one sample, against the gateway."""

    type: ClassVar[str] = "GenerateSample"
    lane: ClassVar[Lane] = Lane.GENERATE
    index: int

    @property
    def key(self) -> str:
        return f"{self.spec.group}.{self.index}"


class ReplayGroup(_OfGroup):
    """Find the samples that another run recorded for the same group (`GroupTemplate.replay_of`)."""

    type: ClassVar[str] = "ReplayGroup"
    lane: ClassVar[Lane] = Lane.GENERATE


class GradeGroup(_OfGroup):
    """Run the user's grader (or reward functions) on the samples of a group. `spent` is what these took
    of devices."""

    type: ClassVar[str] = "GradeGroup"
    lane: ClassVar[Lane] = Lane.USER
    parts: tuple[ArtifactRef, ...]
    entries: tuple[SampleEntry, ...] = ()
    generate_s: float = 0.0
    spent: Spent = {}


class TrainStep(Effect):
    """Take one optimizer step: the version before and the batch make version `step`. `base` is the
    version to start from, and `taken` the number of optimizer steps that led to it (skipped steps make
    no version of their own). `groups` or `rows` are those of the BatchAssembled event `batch`.
    `durable` means that the new version is stored completely, and `pinned` that a checkpoint needs it.
    `retired` lists the parts of earlier versions that are deleted along with the step. `refused` counts
    the batches of this step of which samples were refuted. `sampled` is the version that made the
    samples, if that is not `base` and they are tested."""

    type: ClassVar[str] = "TrainStep"
    lane: ClassVar[Lane] = Lane.TRAIN
    spec: TrainSpec
    step: int
    batch: UUID
    base: StateRef | None = None
    taken: int = 0
    groups: tuple[BatchGroup, ...] = ()
    rows: tuple[int, ...] = ()
    durable: bool = True
    pinned: bool = False
    retired: tuple[ArtifactRef, ...] = ()
    refused: int = Field(default=0, exclude_if=lambda refused: refused == 0)
    sampled: PolicyRef | None = Field(default=None, exclude_if=lambda sampled: sampled is None)

    @property
    def key(self) -> str:
        again = f"/{self.refused}" if self.refused else ""
        return f"{self.spec.run}/step/{self.step}{again}"

    @property
    def run_id(self) -> str:
        return self.spec.run


class SaveCheckpoint(Effect):
    """Store the manifest of a step: shards first, the manifest last, create-only. `reward` is passed
    on to CheckpointSaved and is not part of the manifest."""

    type: ClassVar[str] = "SaveCheckpoint"
    lane: ClassVar[Lane] = Lane.CONTROL
    spec: CheckpointSpec
    reward: float | None = None

    @property
    def key(self) -> str:
        return f"{self.spec.run}/ckpt/{self.spec.step}"

    @property
    def run_id(self) -> str:
        return self.spec.run


class VerifyRun(Effect):
    """Rebuild a run from its log and compare every byte. The effect belongs to the verification and
    not to the run, so that a closed run can be verified."""

    type: ClassVar[str] = "VerifyRun"
    lane: ClassVar[Lane] = Lane.TRAIN
    verification: str
    run: str

    @property
    def run_id(self) -> str:
        return self.verification


class UploadCheckpoint(Effect):
    """Upload a checkpoint to a model hub."""

    type: ClassVar[str] = "UploadCheckpoint"
    lane: ClassVar[Lane] = Lane.EXPORT
    upload: HubUpload

    @property
    def run_id(self) -> str:
        return self.upload.upload


class LoadModel(Effect):
    """Load a checkpoint into the engine that serves deployments. `others` is how many other deployments
    there are. `scope` is the workspace in which the name is unique; None in requests of earlier
    releases."""

    type: ClassVar[str] = "LoadModel"
    lane: ClassVar[Lane] = Lane.SERVE
    request: str
    served: ServedModel
    others: int
    scope: str | None = Field(default=None, exclude_if=lambda scope: scope is None)

    @property
    def key(self) -> str:
        return self.request

    @property
    def run_id(self) -> str:
        return deployment_id(deployment_key(self.served.name, self.scope))


class ChooseCheckpoint(Effect):
    """Find the checkpoint of a finished run with the best held-out reward, to deploy it as `name`."""

    type: ClassVar[str] = "ChooseCheckpoint"
    lane: ClassVar[Lane] = Lane.SERVE
    run: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def run_id(self) -> str:
        return deployment_id(self.name)


ALL_EFFECTS: tuple[type[Effect], ...] = (
    FetchCommit, DiscoverRollouts, ListRefs, ExaminePush, SubmitRun, PostStatus, InitializePolicy,
    GenerateGroup, GenerateSample, ReplayGroup, GradeGroup, TrainStep, SaveCheckpoint, VerifyRun,
    UploadCheckpoint, LoadModel, ChooseCheckpoint, RegradeGroups, CompareGradients,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommitFetched(Outcome):
    """A commit and its rollouts. If one `needs_packages`, their entry points were not examined yet."""

    effect: FetchCommit
    commit: str
    snapshot: ArtifactRef
    rollouts: tuple[DiscoveredRollout, ...]
    needs_packages: bool = False


@dataclass(frozen=True, slots=True)
class RolloutsDiscovered(Outcome):
    effect: DiscoverRollouts
    rollouts: tuple[DiscoveredRollout, ...]


@dataclass(frozen=True, slots=True)
class RefListing(Outcome):
    """The branches and tags of a repository, as full ref name -> commit. An annotated tag has the id of
    the commit that it names. `digest` identifies the listing."""

    effect: ListRefs
    refs: Mapping[str, str]
    digest: str
    default_branch: str | None


@dataclass(frozen=True, slots=True)
class PushRead(Outcome):
    """The triggers that a push matches, or why there are none (see PushExamined)."""

    effect: ExaminePush
    day: str
    matches: tuple[TriggerMatch, ...] = ()
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunSubmitted(Outcome):
    effect: SubmitRun
    run_name: str


@dataclass(frozen=True, slots=True)
class StatusPosted(Outcome):
    effect: PostStatus
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class PolicyBuilt(Outcome):
    """A version exists and is stored durably: version 0, or the version that a TrainStep made."""

    effect: "InitializePolicy | TrainStep"
    state: StateRef
    metrics: dict[str, float] = field(default_factory=dict)
    plan: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, ArtifactRef] = field(default_factory=dict)
    weights_name: str = "adapter_model.safetensors"
    fork: str | None = None
    """how the version before was rebuilt with other bits; None: with the bits of the log"""
    forked: ForkedPolicy | None = None
    """where the first version of a fork comes from"""


@dataclass(frozen=True, slots=True)
class StepRefused(Outcome):
    """Samples of a batch were refuted, so the step was not taken. `served` has the places (slot, index)
    of the samples of each of their servers in the batch."""

    effect: TrainStep
    refutations: tuple[Refutation, ...]
    served: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupSampled(Outcome):
    effect: GenerateGroup
    artifact: ArtifactRef
    entries: tuple[SampleEntry, ...]


@dataclass(frozen=True, slots=True)
class GroupReplayed(Outcome):
    """The samples that another run recorded for a group, or why they cannot be used (`problem`)."""

    effect: ReplayGroup
    parts: tuple[ArtifactRef, ...] = ()
    entries: tuple[SampleEntry, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SampleFinished(Outcome):
    effect: GenerateSample
    artifact: ArtifactRef
    entry: SampleEntry
    files: tuple[ArtifactRef, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupScored(Outcome):
    effect: GradeGroup
    group_artifact: ArtifactRef
    grades: tuple[Grade, ...]
    judgements: ArtifactRef | None = None
    judged: JudgeUsage | None = None


@dataclass(frozen=True, slots=True)
class RunAudited(Outcome):
    effect: VerifyRun
    findings: tuple[Finding, ...]
    steps: int
    checkpoints: int
    artifacts: int
    adapter_sha256: str | None = None
    forks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ManifestPut(Outcome):
    effect: SaveCheckpoint
    manifest: ArtifactRef


@dataclass(frozen=True, slots=True)
class CheckpointUploaded(Outcome):
    effect: UploadCheckpoint
    url: str
    revision: str


@dataclass(frozen=True, slots=True)
class ModelLoaded(Outcome):
    effect: LoadModel


@dataclass(frozen=True, slots=True)
class CheckpointChosen(Outcome):
    """The best checkpoint of a run; None, with the reason, if none can be deployed. `workspace` is that
    of the run."""

    effect: ChooseCheckpoint
    served: ServedModel | None
    reason: str = ""
    workspace: str | None = None
