"""The changes of the read model: one frozen value per kind of row, made by
`consumers/project/event_rows.py`.

Fields are columns. A put is a whole row and is idempotent. A change names only the columns that changed;
None leaves a column as it was. JSON is passed as text. Several values about one key in a batch are
merged in log order.
"""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class PutRun:
    run: str
    name: str
    created_at: datetime
    algorithm: str
    execution_mode: str
    model: str
    dataset: str
    rollout: str | None
    workspace: str | None
    config: str
    dataset_ref: str
    creator: str | None = None
    parent: str | None = None
    parent_step: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """`last_at` is when something last happened to the run."""

    run: str
    last_at: datetime
    name: str | None = None
    status: str | None = None
    phase: str | None = None
    commit_sha: str | None = None
    current_step: int | None = None
    total_steps: int | None = None
    reward: float | None = None
    error: str | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    archived_at: datetime | None = None
    restored_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DropHistory:
    """Delete the rows of a run (and of its validations) that follow from its history, because its events
    are no longer in the log. The rows of the run itself and of its checkpoints stay."""

    run: str


@dataclass(frozen=True, slots=True)
class DropRun:
    """Delete every row of a run."""

    run: str


@dataclass(frozen=True, slots=True)
class DropGivenSecrets:
    """Delete the secrets that were given for a run or evaluation alone before it ended (`at`). A retry
    of the evaluation may have been given others since."""

    owner: str
    at: datetime


@dataclass(frozen=True, slots=True)
class DropSkippedEvent:
    """Forget that an event was skipped, because it is projected now."""

    event: str


@dataclass(frozen=True, slots=True)
class DropArtifact:
    artifact: str


@dataclass(frozen=True, slots=True)
class DropReplacedGroups:
    """Delete the groups of an imported evaluation with a lower `replacement`, whose results a later
    import replaced."""

    evaluation: str
    replacement: int


@dataclass(frozen=True, slots=True)
class DropDataset:
    dataset: str


@dataclass(frozen=True, slots=True)
class Unarchive:
    """Record that a run has its history again."""

    run: str


@dataclass(frozen=True, slots=True)
class PutMetric:
    run: str
    key: str
    step: int
    value: float
    at: datetime


@dataclass(frozen=True, slots=True)
class PutCheckpoint:
    run: str
    step: int
    reward: float | None
    uri: str
    manifest_sha256: str
    adapter_sha256: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class PutGroup:
    """`artifact` and `judgements` are an ArtifactRef, `grades` a list of Grade, as JSON. `attempts` says
    which attempts at the row the samples are, as JSON; None: all of them, in order."""

    owner: str
    purpose: str
    step: int
    slot: int
    replacement: int
    dataset_row: int
    num_samples: int
    artifact: str
    grades: str
    at: datetime
    judgements: str | None = None
    attempts: str | None = None


@dataclass(frozen=True, slots=True)
class PutCost:
    """The cost of the work that an event records. `run` is the run or evaluation that it is about, and
    `owner` the one that paid, which is the run of a validation."""

    event: str
    run: str
    owner: str
    step: int | None
    sample: str | None
    effect: str | None
    device: str | None
    device_s: float
    wasted_s: float
    sampled: int
    trained: int
    discarded: int
    calls_usd: float
    calls_tokens: int
    stored_bytes: int
    at: datetime


@dataclass(frozen=True, slots=True)
class PutLog:
    """A line of a run's or an evaluation's log; (xid, position) is its event's cursor, `line`
    counts within the event."""

    run: str
    xid: int
    position: int
    line: int
    at: datetime
    level: str
    step: int | None
    message: str


@dataclass(frozen=True, slots=True)
class PutDataset:
    dataset: str
    name: str
    ref: str
    columns: str
    num_rows: int
    file_name: str
    file_size: int
    original: str
    created_at: datetime
    workspace: str | None = None
    organisation: str | None = None
    version: int = 1
    series: str | None = None


@dataclass(frozen=True, slots=True)
class PutArtifact:
    """A published version. The text `precedence` sorts as versions do."""

    artifact: str
    organisation: str
    kind: str
    name: str
    semver: str
    precedence: str
    is_prerelease: bool
    sha256: str
    file_size: int
    num_files: int
    unpacked_bytes: int
    summary: str
    publisher: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class PutWorkspace:
    workspace: str
    name: str
    url: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ChangeWorkspace:
    """An error of "" clears it, and a `forge` of "" means that no forge is connected."""

    workspace: str
    updated_at: datetime
    status: str | None = None
    commit_sha: str | None = None
    rollouts: str | None = None
    error: str | None = None
    forge: str | None = None
    refs_digest: str | None = None
    refs_error: str | None = None
    refs_at: datetime | None = None
    default_branch: str | None = None


@dataclass(frozen=True, slots=True)
class PutDelivery:
    """Something that arrived about a repository. `kind` is push, ping, or the reason of a check of its
    refs."""

    workspace: str
    event: str
    kind: str
    at: datetime
    forge: str | None = None
    delivery: str | None = None
    ref: str | None = None
    before: str | None = None
    after: str | None = None
    forced: bool = False
    pusher: str | None = None


@dataclass(frozen=True, slots=True)
class PutPush:
    """A move of a ref. With `baseline` it was only remembered."""

    push: str
    workspace: str
    number: int
    ref: str
    before: str | None
    after: str | None
    baseline: bool
    at: datetime


@dataclass(frozen=True, slots=True)
class ChangePush:
    push: str
    examined: bool = True
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PutTriggeredRun:
    """A trigger that a push matched, and what became of it: queued, skipped, fired, submitted,
    refused."""

    run: str
    push: str
    workspace: str
    trigger: int
    config: str
    outcome: str


@dataclass(frozen=True, slots=True)
class ChangeTriggeredRun:
    """A `detail` of "" clears it. `commit_state` and `commit_text` are the status of the commit."""

    run: str
    outcome: str | None = None
    run_name: str | None = None
    detail: str | None = None
    commit_state: str | None = None
    commit_text: str | None = None


@dataclass(frozen=True, slots=True)
class PutEvaluation:
    evaluation: str
    name: str
    run: str | None
    step: int | None
    model: str
    dataset: str
    rollout: str | None
    config: str | None
    dataset_ref: str
    total: int
    created_at: datetime
    workspace: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeEvaluation:
    """An error of "" clears it."""

    evaluation: str
    status: str | None = None
    reward: float | None = None
    metrics: str | None = None
    error: str | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PutSkippedEvent:
    """An event that `projection` could not turn into rows. A rebuild deletes it."""

    projection: str
    event: str
    run: str
    event_type: str
    stream: str
    version: int
    xid: int
    position: int
    error: str
    at: datetime


@dataclass(frozen=True, slots=True)
class PutLetter:
    """A dead letter; `version` is its place in its consumer's stream of them."""

    letter: str
    version: int
    consumer: str
    message_type: str
    about: str
    cause: str
    pauses: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ChangeLetter:
    letter: str
    redriven_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PutDeployment:
    deployment: str
    workspace: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ChangeDeployment:
    """`key` is that of `schemas.deployments.deployment_key`. `served` is the ServedModel that is active,
    as JSON. `pending` is the ref that is being loaded, by the request with the id `request`. `error` is
    why the last request failed. All three are empty if there is none."""

    key: str
    updated_at: datetime
    status: str | None = None
    number: int | None = None
    served: str | None = None
    pending: str | None = None
    error: str | None = None
    request: str | None = None
    requested_by: str | None = None
    deployed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ChangeNamedDeployment:
    """A change by an event of an earlier release, which says a name and not its workspace. With an
    `error`, the request `request` failed. Without, the holder of the name has undeployed."""

    name: str
    updated_at: datetime
    request: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class PutHubUpload:
    upload: str
    run: str
    step: int
    repository: str
    form: str
    visibility: str
    requested_by: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ChangeHubUpload:
    """`status` is `uploaded` or `failed`, with the commit or the error."""

    upload: str
    updated_at: datetime
    status: str | None = None
    url: str | None = None
    revision: str | None = None
    error: str | None = None


Write = (
    PutRun
    | ChangeRun
    | PutMetric
    | PutCheckpoint
    | PutGroup
    | PutCost
    | PutLog
    | PutDataset
    | PutArtifact
    | PutWorkspace
    | ChangeWorkspace
    | PutDelivery
    | PutPush
    | ChangePush
    | PutTriggeredRun
    | ChangeTriggeredRun
    | PutEvaluation
    | ChangeEvaluation
    | PutLetter
    | PutSkippedEvent
    | ChangeLetter
    | PutDeployment
    | ChangeDeployment
    | ChangeNamedDeployment
    | PutHubUpload
    | ChangeHubUpload
    | DropHistory
    | DropRun
    | DropGivenSecrets
    | DropSkippedEvent
    | DropReplacedGroups
    | DropDataset
    | DropArtifact
    | Unarchive
)
