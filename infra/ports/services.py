"""The ports to what lies outside of the database: blobs, datasets, git, forges, user code, and the
gateway to the policy.

Those to the database and the broker are in `infra/spine/ports`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from infra.ports.packages import DeclaredPackages, ResolvedPackages
from schemas.datasets import DatasetRow
from schemas.errors import FailureCategory, UserCodeError
from schemas.sampling import Grade, Message, SampleFailure, SampleRecord, ToolSpec, Turn
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.secrets.secret_value import SecretValue
from schemas.specs import (
    CommitSpec,
    CommitStatus,
    DatasetRef,
    DiscoveredRollout,
    Entrypoint,
    GroupSpec,
    PackageEnvironment,
    Push,
    PushOrigin,
    RolloutRef,
)


class BlobExists(Exception):
    """A create-only put found that the key is taken."""


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob as a listing shows it. `modified` is the store's own clock, with its zone."""

    key: str
    uri: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class StreamedBlob:
    """A blob that was stored piece by piece: its URI, its size and the SHA-256 of its content."""

    uri: str
    size: int
    sha256: str


class Blobs(Protocol):
    """Bytes under keys (`runs/<run>/objects/<sha>`, `datasets/<sha>` ...). Durable on return."""

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        """Store the data and return its URI. `sha256` is the hash of the content, if the caller has
        computed it. With `create_only`, raises BlobExists when the key is taken."""
        ...

    async def put_file(self, key: str, path: Path) -> str:
        """Store a file's bytes and return their URI."""
        ...

    async def put_stream(self, key: str, body: AsyncIterator[bytes]) -> StreamedBlob:
        """Store what `body` yields, with a few pieces in memory at a time. When `body` raises, nothing
        is stored."""
        ...

    async def get_blob(self, uri: str) -> bytes:
        """Return all bytes. Raises NotFound."""
        ...

    def chunks(self, uri: str, *, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` to before `stop` in pieces of a few MiB, for callers that do not
        need all of them in memory. They are not verified; the caller checks the hash of all of them.
        Raises NotFound at the first piece."""
        ...

    async def delete(self, uri: str) -> None:
        """Delete a blob. It may be absent already."""
        ...

    async def file(self, uri: str) -> Path | None:
        """Return the path of the bytes if they are a file on this machine, or else None."""
        ...

    async def exists(self, key: str) -> str | None:
        """Return the URI if the key is taken, or else None."""
        ...

    async def keys(self, prefix: str) -> Sequence[BlobInfo]:
        """Return all blobs whose keys begin with `prefix`, in the order of their keys. Foreign files
        whose names are not keys are not listed."""
        ...


class Datasets(Protocol):
    """The rows of registered datasets."""

    async def rows(self, ref: DatasetRef) -> Sequence[DatasetRow]:
        """Return all rows, cached by content hash."""
        ...


@dataclass(frozen=True, slots=True)
class RefList:
    """The branches and tags of a repository: full ref name -> commit. An annotated tag has the id of the
    commit that it names. `digest` is equal for equal listings. `default_branch` is a short name, or
    None in an empty repository."""

    refs: Mapping[str, str]
    digest: str
    default_branch: str | None


class Repositories(Protocol):
    """Git, without ever running a checkout or a hook of a hostile repository."""

    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        """Fetch and return the full sha. Raises Refused when there is no such ref or commit."""
        ...

    async def snapshot(self, workspace: str, sha: str) -> bytes:
        """Return the commit's tree as a deterministic tar. Raises Refused when the tree has something
        that is not allowed."""
        ...

    async def check(self, url: str) -> str:
        """Return the name of the default branch. Raises Refused when `url` is not a repository."""
        ...

    async def list_refs(self, workspace: str, url: str, *, background: bool = False) -> RefList:
        """Return all branches and tags as the repository has them now. In the `background` the work has
        low priority. Raises Refused when it is not a
        repository, or has more refs than are followed, and RepositoryAway when it does not answer."""
        ...

    async def read_file(self, workspace: str, sha: str, path: str, *, most: int) -> bytes | None:
        """Return a regular file of a commit that `fetch` returned, or None when there is none. Raises
        Refused when the path holds something else, or more than `most` bytes."""
        ...

    async def message(self, workspace: str, sha: str) -> str:
        """Return the message of a commit that `fetch` returned, cut to 64 KiB."""
        ...

    async def changed_paths(self, push: Push) -> tuple[str, ...] | None:
        """Return the paths in which the trees of a push's two commits differ, by git's own comparison.
        Each commit is fetched alone. None means all paths: the ref is new, the repository does not give
        out the commit before, or too many paths differ."""
        ...


@dataclass(frozen=True, slots=True)
class UserOutput:
    """The traces of user code in one call: the text that it printed, the traceback of its error, and the
    bytes of its files by name. All are bounded and masked. `is_cut` is true if there was more."""

    stdout: str = ""
    traceback: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_cut: bool = False


class UserCodeRaised(UserCodeError):
    """User code raised an error or missed its deadline. `output` is what it left behind, if anything."""

    def __init__(
        self, category: FailureCategory, message: str, *, output: UserOutput | None = None
    ) -> None:
        super().__init__(category, message)
        self.output = output


@dataclass(frozen=True, slots=True)
class Credit:
    """The things that a workflow said about parts of its attempt: the rewards of turns by their numbers,
    the agents that answered them, and the own rewards of these agents. The turns may not exist."""

    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    turn_agents: Mapping[int, str] = field(default_factory=dict)
    agent_rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_given(self) -> bool:
        return bool(self.turn_rewards or self.turn_agents or self.agent_rewards)


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """The result of a workflow: its messages, or None when it returned nothing. With None, the
    conversation that the gateway recorded is used. `output` is what it left behind, if anything."""

    messages: tuple[Message, ...] | None
    output: UserOutput | None = None
    credit: Credit = Credit()


@dataclass(frozen=True, slots=True)
class GraderResult:
    """The result of a grader: one grade per sample, in index order. `output` is what it left behind, if
    anything."""

    grades: tuple[Grade, ...]
    output: UserOutput | None = None


@dataclass(frozen=True, slots=True)
class ServedResult:
    """The grade that a rollout server gave to its own attempt, and what it left behind."""

    grade: Grade
    output: UserOutput | None = None


@dataclass(frozen=True, slots=True)
class SandboxOwner:
    """The run or evaluation on whose behalf user code runs (its id). It has a sandbox of its own per
    role, which gets the values of its `secrets` as environment variables."""

    run: str
    secrets: Mapping[str, SecretValue] = field(default_factory=dict, repr=False)

    @property
    def masks(self) -> Masks:
        """The masks of the values of its secrets."""
        return _masks_of(frozenset(self.secrets.items())) if self.secrets else NO_MASKS


@lru_cache(maxsize=64)
def _masks_of(secrets: frozenset[tuple[str, SecretValue]]) -> Masks:
    """The masks of secrets. They are kept, because those of large values take long to make."""
    return Masks({name: value.reveal() for name, value in secrets})


class UserCode(Protocol):
    """The workspace's code, in confined processes. Workflow and grader run in separate processes."""

    async def resolve(self, declared: DeclaredPackages) -> ResolvedPackages:
        """Choose the exact versions of the packages of a rollout. Raises Refused, with what to do, when
        they cannot be installed."""
        ...

    async def discover(
        self,
        snapshot: bytes,
        entrypoints: Sequence[Entrypoint],
        *,
        environments: Mapping[str, PackageEnvironment] = ...,
    ) -> tuple[DiscoveredRollout, ...]:
        """Import each entry point in a process of its own, and return what it defines. The process is
        then thrown away. `environments` are the packages of rollouts, by name."""
        ...

    async def run_workflow(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        sample: str,
        prompt: Sequence[Message],
        metadata: Mapping[str, object],
        base_path: str,
        api_key: str,
    ) -> WorkflowResult:
        """Run the AgentWorkflow once, under its deadline, and return its result. Raises UserCodeError,
        which is a UserCodeRaised when the code itself failed."""
        ...

    async def run_served(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        sample: str,
        prompt: Sequence[Message],
        label: str | None,
        metadata: Mapping[str, object],
        base_path: str,
        api_key: str,
    ) -> ServedResult:
        """Have a rollout server make one attempt and grade it, and return the grade (its index means
        nothing) with what it left behind. Such a server gets the label with the prompt. Raises
        UserCodeError."""
        ...

    async def grade(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        group: str,
        label: str | None,
        metadata: Mapping[str, object],
        samples: Sequence[SampleRecord],
    ) -> GraderResult:
        """Grade the samples that did not fail (a Grader, or weighted reward functions). Raises
        UserCodeError when the grader as a whole failed."""
        ...

    async def aclose(self) -> None:
        """End all its processes."""
        ...


class Submissions(Protocol):
    """The door by which runs are submitted."""

    async def submit(self, origin: PushOrigin, config: bytes) -> str:
        """Submit the run of a push and a trigger, with the TOML `config` of the pushed commit. Returns
        the run's name. Submitting again returns the same name. Raises Refused when the run is refused,
        with all issues."""
        ...


class Forges(Protocol):
    """The APIs of the forges that hold the connected repositories."""

    async def post(self, status: CommitStatus) -> bool:
        """Show a status on a commit, unless the commit shows this status already. Returns False when
        the workspace is not connected, or has no token that may post. Raises Refused when the forge
        refuses the status for good, and ForgeAway when it does not answer."""
        ...


class Session(Protocol):
    """One sample's access to the policy. It is usable until it is closed, or its deadline has passed."""

    base_path: str
    api_key: str
    interrupted: bool
    """The platform failed one of its requests, so what the sample became is not recorded."""
    waits_for_sampler: bool
    """A request failed because another worker replaces the weights of the servers."""
    refusal: SampleFailure | None
    """How the engine or the provider refused the newest request. A workflow that then raises failed
    because of it. None when that request was answered, or refused for its own form."""
    tools: tuple[ToolSpec, ...]
    """Once it is closed: the tools that the last answered request offered."""
    offered: tuple[tuple[ToolSpec, ...], ...]
    """Once it is closed: the tools that each answered request offered."""
    branches: tuple[tuple[Message, ...], ...]
    """Once it is closed: the conversations that no answered request continues, in the order of their
    requests."""

    def close(self) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        """End the session. Returns the exact turns, and the conversation as the gateway saw it."""
        ...


class GatewaySockets(Protocol):
    """The unix sockets by which sandboxes reach the gateway. A socket is the identity of its sandbox."""

    async def open_socket(self, run: str, *, network: Sequence[str] = ()) -> Path:
        """Open a socket and return its path. Only samples of this run or evaluation (`SandboxOwner.run`)
        are reachable through it, and the host:port pairs of `network` by its proxy."""
        ...

    async def close_socket(self, path: Path) -> None:
        """Close a socket with all its connections, and remove it. It may be closed already."""
        ...


class Gateway(Protocol):
    """The way from a workflow to the policy that it samples from."""

    def open(
        self, spec: GroupSpec, index: int, *, deadline_s: float, masks: Masks = NO_MASKS
    ) -> Session:
        """Open a session for one sample of a group, which ends after `deadline_s` seconds. The messages
        of its requests are masked before anything is sampled or recorded."""
        ...
