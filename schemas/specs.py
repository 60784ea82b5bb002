"""The values that events and effects share. They describe work completely, so that performing it needs
only the message itself and the artifacts that it refers to."""

from functools import lru_cache
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from schemas.algorithms import COMPARES_PARTS
from schemas.artifact_refs import ArtifactRef, Sha256
from schemas.config import Advanced, EvalAdvanced, RunConfig
from schemas.ids import HEADRACE, GroupKey, Purpose, RunId, derive_id, short_id
from schemas.models.reward_model import RewardModelSpec, score_names
from schemas.models.teacher import TeacherRef
from schemas.sampling import (
    Day,
    DrawKey,
    LoraScaling,
    ModelRef,
    PolicyRef,
    ProviderRef,
    SamplingParams,
    Value,
)


@lru_cache(maxsize=4096)
def _group_key(group: str) -> GroupKey:
    """The key of a group of ours, which is parsed dozens of times while its samples are made."""
    return GroupKey.parse(group)


class Entrypoint(Value):
    """A Python file of a rollout: `rollouts/<rollout>/<path>`."""

    rollout: str
    path: str = "main.py"


class CommitSpec(Value):
    """Which commit of a repository (a path or a URL): the head of a branch, or a pinned sha. Without
    branch and sha it is the default branch's head at the time when the effect runs. `ref` is the full
    name of the ref at which the repository itself listed `sha`, for the commit of a push. Such a commit
    needs no proof that a branch reaches it."""

    url: str
    branch: str | None = None
    sha: str | None = None
    ref: str | None = None


class RefMove(Value):
    """A ref of a repository moved. `before` is None for a new ref, and `after` for a deleted one.
    `number` counts the moves of the workspace, from 1."""

    ref: str
    before: str | None
    after: str | None
    number: int = Field(ge=1)


class Push(Value):
    """A ref moved to a commit: what a trigger decides on. `number` is that of its RefMove."""

    workspace: str
    workspace_name: str
    url: str
    number: int = Field(ge=1)
    ref: str
    before: str | None
    after: str

    @property
    def id(self) -> str:
        """A unique name of the push: `<workspace>.<number>`."""
        return f"{self.workspace}.{self.number}"


Concurrency = Literal["queue", "cancel_previous", "skip"]


class TriggerMatch(Value):
    """A trigger that a push matched: the number of its table in `headrace.toml` (from 1), and what a
    run of it needs. `label` is the name of its config, with a number if an earlier trigger of the file
    has the same one. `run_name` is the filled template, or None. `overrides` is the JSON of `set`."""

    trigger: int = Field(ge=1)
    config: str
    label: str = ""
    run_name: str | None = None
    overrides: str = "{}"
    concurrency: Concurrency = "queue"
    max_runs_per_day: int | None = None
    require_approval: bool = False


class PushOrigin(Value):
    """Why a run exists: the push and the trigger that it matched. `context` names the commit status of
    the run. `require_approval` means that the run waits until a person approves it."""

    push: Push
    match: TriggerMatch
    context: str

    @property
    def require_approval(self) -> bool:
        return self.match.require_approval

    @property
    def key(self) -> str:
        """The idempotency key of the run. A push and a trigger make one run, whatever is repeated."""
        push = self.push
        place = f"{push.workspace}/{push.ref}/{push.before}/{push.after}/{push.number}"
        return str(derive_id(HEADRACE, f"push/{place}/{self.match.trigger}"))

    @property
    def run(self) -> RunId:
        """The id of the run, which is known before the run is submitted."""
        return RunId(short_id("run", self.key))


StatusState = Literal["pending", "success", "failure", "error"]


class CommitStatus(Value):
    """A status on a commit, as forges show it. A later status with the same `context` replaces it.
    `text` is one line of at most 140 characters. `link` is a path on this server, or None."""

    workspace: str
    sha: str
    context: str
    state: StatusState
    text: str
    link: str | None = None


RolloutKind = Literal["classes", "server"]
"""The form of an entry point: classes and functions for our host, or a program that serves rollouts by
the Osmosis protocol."""


def _is_classes(kind: object) -> bool:
    return kind == "classes"


MOST_RUBRIC_BYTES = 16 << 10
"""Bytes of all rubrics of a run together, because every event of a group repeats them."""


class RubricSpec(Value):
    """A rubric and its judge. The judge scores an answer from `low` to `high` by the criteria in `text`,
    and the reward gets `weight` times the score. With a `base_url` the judge is the model of an
    OpenAI-compatible server, otherwise `model` is PROVIDER/MODEL. `api_key_secret` names the secret with
    the key. `usd_per_million` is the price of prompt tokens and answer tokens. `asks` means that a
    function of the entry point says what the judge reads about a sample. With the scope `group` the
    judge reads all answers of a group at once, and compares them."""

    name: str
    text: str
    model: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    base_url: str | None = None
    api_key_secret: str | None = None
    usd_per_million: tuple[float, float] | None = None
    asks: bool = False
    scope: Literal["sample", "group"] = Field(default="sample", exclude_if=lambda v: v == "sample")


class JudgeBudget(Value):
    """The most that the judges of a run or evaluation may use, all of them together."""

    max_calls: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None


def rubric_specs(advanced: Advanced | EvalAdvanced) -> tuple[RubricSpec, ...]:
    """Return the rubrics of a config, each with a name."""
    return tuple(
        RubricSpec(
            name=rubric.name or f"rubric_{number}",
            text=rubric.text,
            model=rubric.model,
            weight=rubric.weight,
            low=rubric.scale[0],
            high=rubric.scale[1],
            base_url=rubric.base_url,
            api_key_secret=rubric.api_key_secret,
            usd_per_million=rubric.usd_per_million,
            scope=rubric.scope or "sample",
        )
        for number, rubric in enumerate(advanced.rubrics, 1)
    )


def part_weights(advanced: Advanced) -> dict[str, float]:
    """Return the parts of the reward that the run's algorithm compares one by one, by name with their
    weights. Empty for an algorithm that compares whole rewards."""
    if advanced.algorithm not in COMPARES_PARTS:
        return {}
    named = [(reward.name, reward.weight) for reward in advanced.rewards]
    named += [(rubric.name, rubric.weight) for rubric in rubric_specs(advanced)]
    weights = (one.weight for one in advanced.reward_models)
    return dict([*named, *zip(score_names(advanced.reward_models), weights, strict=True)])


def judge_budget(advanced: Advanced | EvalAdvanced) -> JudgeBudget:
    """Return the most that the judges of a run may use."""
    return JudgeBudget(
        max_calls=advanced.judge_max_calls,
        max_tokens=advanced.judge_max_tokens,
        max_usd=advanced.judge_max_usd,
    )


def _is_empty(value: object) -> bool:
    return value is None or value in ((), {})


class PackageEnvironment(Value):
    """The locked packages of a rollout: a lock file (`uv.lock` or the pins of a resolution), the version
    of Python, and the platform. `key` is the hash of all three. Equal keys share one environment.
    `packages` is how many there are."""

    key: Sha256
    lock: ArtifactRef
    python: str
    platform: str
    packages: int = 0


class DiscoveredRollout(Value):
    """The definitions of an entry point, or the reason why it could not be loaded (file and line). An
    entry point of kind `server` was not run, so its definitions are unknown. `tools` are the names of
    the functions that its workflow offers to the model. `mcp` are the names of the MCP servers that it
    uses, and `mcp_addresses` the host:port of those elsewhere. `environment` has its packages."""

    entrypoint: Entrypoint
    kind: RolloutKind = Field(default="classes", exclude_if=_is_classes)
    workflow: str | None = None
    grader: str | None = None
    rewards: tuple[str, ...] = ()
    tools: tuple[str, ...] = Field(default=(), exclude_if=lambda value: not value)
    mcp: tuple[str, ...] = Field(default=(), exclude_if=lambda value: not value)
    mcp_addresses: tuple[str, ...] = Field(default=(), exclude_if=lambda value: not value)
    rubrics: tuple[RubricSpec, ...] = Field(default=(), exclude_if=_is_empty)
    environment: PackageEnvironment | None = Field(default=None, exclude_if=_is_empty)
    error: str | None = None


class DatasetRef(Value):
    """A version of a registered dataset: its normalised content (JSON Lines) and its number of rows."""

    dataset: str
    name: str
    content: ArtifactRef
    num_rows: int = Field(ge=1)
    version: int = Field(default=1, ge=1, exclude_if=lambda value: value == 1)


class RewardSpec(Value):
    name: str
    weight: float = 1.0


class RolloutRef(Value):
    """User code to run: the snapshot of a workspace (a tar), and what a run uses of its entry point.

    A rollout of kind `server` makes attempts and grades them itself, so it has neither workflow nor
    grader of ours. `environment` has the packages of the rollout (None: it needs the standard library
    only), and `network` the host:port pairs that it may connect to. `max_turns`, `max_sample_tokens`
    and `max_response_tokens` (those that the policy generates) limit each sample. `failed_rewards` are
    the rewards of samples that the policy made fail, by category. Judges score `rubrics` outside of user
    code, within the budget `judge`, and `reward_models` score each sample where it is made.

    It gets the secrets that `secrets` names: those of `workspace`, and the personal ones of the person
    `submitter`. If a push started the run, `pushed` is true and `submitter` is None, because the author
    of the code may be unknown.
    """

    snapshot: ArtifactRef
    commit: str
    entrypoint: Entrypoint
    kind: RolloutKind = Field(default="classes", exclude_if=_is_classes)
    workflow: str | None
    grader: str | None
    rewards: tuple[RewardSpec, ...] = ()
    env: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    pushed: bool = False
    workspace: str | None = None
    submitter: str | None = None
    environment: PackageEnvironment | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    max_turns: int | None = Field(default=None, exclude_if=lambda value: value is None)
    max_sample_tokens: int | None = Field(default=None, exclude_if=lambda value: value is None)
    max_response_tokens: int | None = Field(default=None, exclude_if=lambda value: value is None)
    failed_rewards: dict[str, float | Literal["grade"]] = Field(default={}, exclude_if=_is_empty)
    rubrics: tuple[RubricSpec, ...] = Field(default=(), exclude_if=_is_empty)
    judge: JudgeBudget | None = Field(default=None, exclude_if=_is_empty)
    reward_models: tuple[RewardModelSpec, ...] = Field(default=(), exclude_if=_is_empty)
    workflow_timeout_s: float = 450
    grader_timeout_s: float = 150

    @property
    def makes_attempts(self) -> bool:
        """Whether user code makes the samples. Otherwise a sample is one turn of the policy."""
        return self.kind == "server" or self.workflow is not None

    @property
    def is_scored_by_models(self) -> bool:
        """Whether judges and reward models alone score the samples, so that no user code runs to grade
        them."""
        asks = any(rubric.asks for rubric in self.rubrics)
        by_code = self.kind == "server" or self.grader is not None or bool(self.rewards)
        return bool(self.rubrics or self.reward_models) and not asks and not by_code


class GroupTemplate(Value):
    """The settings that all groups of one request share. Only in tests of engines `rollout` is None,
    because nothing grades such groups. `teacher_hint` and `teacher_server` are those of a run that
    distils, and `rules` those of a run (`TrainSpec`). `replay_of` has recorded samples to take, and
    servers to `avoid` made samples that were refuted."""

    dataset: DatasetRef
    model: ModelRef
    policy: PolicyRef
    tuning: Literal["lora", "full"] = "lora"
    lora_alpha: float = 32.0
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=lambda value: value is None)
    params: SamplingParams
    num_samples: int = Field(ge=1)
    rollout: RolloutRef | None = None
    run: str | None = None
    teacher_hint: str | None = Field(default=None, exclude_if=lambda value: value is None)
    teacher_server: ProviderRef | None = Field(default=None, exclude_if=lambda value: value is None)
    rules: int = Field(default=1, exclude_if=lambda value: value == 1)
    replay_of: str | None = Field(default=None, exclude_if=lambda value: value is None)
    avoid: tuple[str, ...] = Field(default=(), exclude_if=_is_empty)


Attempts = Annotated[tuple[int, ...], Field(default=(), exclude_if=lambda value: value == ())]
"""Which attempts at their row the samples of a group are. Empty: all of them, in order."""


class Slot(Value):
    """One group of a request: its slot, its replacement number and its dataset row. `attempts` is set
    where only some attempts at the row are requested again."""

    slot: int
    replacement: int = 0
    row: int
    attempts: Attempts = ()


class GroupSpec(Value):
    """The full specification of one group."""

    group: str
    row: int
    template: GroupTemplate
    attempts: Attempts = ()

    @property
    def group_key(self) -> GroupKey:
        return _group_key(self.group)

    @property
    def owner(self) -> str:
        return self.group_key.owner

    @property
    def purpose(self) -> Purpose:
        return self.group_key.purpose

    def draw_key(self, index: int) -> DrawKey:
        """The key of sample `index` for the counter-based generator. It does not contain a uuid."""
        key = self.group_key
        return DrawKey(
            purpose=str(key.purpose),
            step=key.step,
            slot=key.slot,
            replacement=key.number,
            sample=index,
        )


class SampleEntry(Value):
    """The index entry of one sample: enough for metrics and decisions, without its tokens. `alarm`
    describes what is wrong with the engine that sampled it. One entry of a group says it for all.
    `usd` is the price of a provider's answers in US dollars, if it is known."""

    index: int
    failure: str | None = None
    message: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_turns: int = 0
    truncated: bool = False
    alarm: str | None = None
    usd: float | None = Field(default=None, exclude_if=lambda value: value is None)


class BatchGroup(Value):
    """One group of a batch: where its samples are, and their rewards in the order of their index. For
    an algorithm that compares the parts of rewards, `parts` are their values by name in that order."""

    slot: int
    replacement: int
    artifact: ArtifactRef
    rewards: tuple[float | None, ...]
    parts: dict[str, tuple[float | None, ...]] = Field(default={}, exclude_if=_is_empty)


class TrainSpec(Value):
    """Everything that the learner must know about a run. `validation` holds the held-out rows that it
    measures itself (in runs that sample nothing; where there is user code, the grader scores them).
    `rules` is the number of the rules that it started with (`schemas.learner.RULES`), 1 in logs that do
    not say. `date` is that of chat templates. `teacher` is the model that a run learns from. A run that
    `attests` tests its samples before it trains them."""

    run: str
    config: RunConfig
    model: ModelRef
    total_steps: int = Field(ge=1)
    dataset: DatasetRef
    validation: DatasetRef | None = None
    rules: int = 1
    date: Day | None = None
    teacher: TeacherRef | None = Field(default=None, exclude_if=_is_empty)
    attests: bool = Field(default=False, exclude_if=lambda attests: not attests)

    def is_scored(self, step: int) -> bool:
        """Whether the learner measures the held-out loss of this version: the first, the last, and one
        in every `eval_interval` steps."""
        every = self.config.checkpoints.eval_interval
        due = step in (0, self.total_steps) or (every is not None and step % every == 0)
        return self.validation is not None and due


class StateRef(Value):
    """A policy version and where it is stored durably.

    `weights` and `state` are None where only the hash was recorded (`schemas.learner.LearnerState`).
    Such a version is rebuilt by replaying the steps since the last durable one. `durable` is true when
    both are stored.
    """

    step: int
    weights_sha256: Sha256
    state_sha256: Sha256
    weights: ArtifactRef | None = None
    state: ArtifactRef | None = None

    @property
    def durable(self) -> bool:
        return self.weights is not None and self.state is not None


class CheckpointSpec(Value):
    """The content of a checkpoint's manifest, a pure function of the step. `files` are those that all
    checkpoints of the run share. The step's weights are stored with them as `weights_name`."""

    run: str
    step: int
    model: ModelRef
    tuning: Literal["lora", "full"]
    state: StateRef
    batch: UUID | None
    plan: tuple[int, ...]
    versions: dict[str, str]
    seed: int
    parent: Sha256 | None
    files: dict[str, ArtifactRef] = {}
    weights_name: str = "adapter_model.safetensors"


class Finding(Value):
    """Something that disagrees with the log: an event, an artifact, or (where known) its bytes from
    `first_byte` to `last_byte`, both included."""

    kind: Literal["event", "artifact"]
    what: str
    message: str
    first_byte: int | None = None
    last_byte: int | None = None


class Plan(Value):
    """The shape of a run, fixed when it starts."""

    total_steps: int
    batch_size: int
    num_samples: int
    num_rows: int
