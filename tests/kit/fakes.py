"""Fakes for the ports that performers use: scripted engines and user code.

Artifacts, datasets and blobs are the real adapters on a temporary directory. The log is the adapter in
memory, which passes the same contract suite as the one on Postgres.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid5

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.local import LocalBlobs
from infra.ports.packages import DeclaredPackages, ResolvedPackages
from infra.ports.services import (
    GraderResult,
    RefList,
    Repositories,
    SandboxOwner,
    ServedResult,
    Submissions,
    WorkflowResult,
)
from infra.settings.settings import Settings
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.clock import ManualClock
from schemas.datasets import DatasetRow
from schemas.errors import Refused, TransientError
from schemas.events import Event
from schemas.ids import HEADRACE
from schemas.learner import (
    GradientComparison,
    LearnedRow,
    LearnerJob,
    LearnerState,
    StepBatch,
    StepResult,
)
from schemas.sampling import (
    Grade,
    Message,
    SampleFailure,
    SampleRecord,
    SampleRequest,
    ToolSpec,
    Turn,
)
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.specs import (
    CommitSpec,
    DatasetRef,
    DiscoveredRollout,
    Entrypoint,
    GroupSpec,
    PackageEnvironment,
    Push,
    RolloutRef,
)
from tests.kit.ports import AllPorts


def turn(text: str, *, prompt: tuple[int, ...] = (1, 2), cut: bool = False) -> Turn:
    """A turn whose completion is `text`, with one token id per character."""
    ids = tuple(ord(character) for character in text)
    return Turn(
        prompt_ids=prompt,
        completion_ids=ids,
        logprobs=(-0.5,) * len(ids),
        text=text,
        finish_reason="length" if cut else "stop",
    )


class FakeSampler:
    """Answers each request with `answer(request)`, and records the requests."""

    def __init__(self, answer: Callable[[SampleRequest], Turn]) -> None:
        self._answer = answer
        self.requests: list[SampleRequest] = []
        self.prepared: list[SampleRequest] = []

    async def prepare(self, request: SampleRequest) -> None:
        self.prepared.append(request)

    async def sample(self, request: SampleRequest) -> Turn:
        self.requests.append(request)
        return self._answer(request)


@dataclass
class FakeSession:
    """The gateway session of one sample. A scripted workflow fills `turns` and `conversation`."""

    base_path: str
    api_key: str
    deadline_s: float
    turns: list[Turn] = field(default_factory=list)
    conversation: list[Message] = field(default_factory=list)
    closed: bool = False
    interrupted: bool = False
    waits_for_sampler: bool = False
    refusal: SampleFailure | None = None
    tools: tuple[ToolSpec, ...] = ()
    offered: tuple[tuple[ToolSpec, ...], ...] = ()
    branches: tuple[tuple[Message, ...], ...] = ()

    def ask(self, prompt: Sequence[Message], text: str) -> Message:
        """Record a request and its reply, as a workflow's request to the gateway would."""
        reply = Message(role="assistant", content=text)
        self.turns.append(turn(text))
        self.conversation = [*prompt, reply]
        return reply

    def close(self) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        self.closed = True
        return tuple(self.turns), tuple(self.conversation)


class FakeGateway:
    """Opens sessions and finds them again by their key."""

    def __init__(self) -> None:
        self.sessions: dict[str, FakeSession] = {}

    def open(
        self, spec: GroupSpec, index: int, *, deadline_s: float, masks: Masks = NO_MASKS
    ) -> FakeSession:
        key = f"key-{spec.group}.{index}"
        session = FakeSession(f"/v1/samples/{spec.group}.{index}", key, deadline_s)
        self.sessions[key] = session
        return session


Workflow = Callable[[Sequence[Message], FakeSession], WorkflowResult]
Grader = Callable[[str | None, Sequence[SampleRecord]], tuple[Grade, ...] | GraderResult]


class FakeUserCode:
    """Runs scripted workflows and graders, and records the arguments of workflows."""

    def __init__(
        self,
        *,
        gateway: FakeGateway | None = None,
        workflow: Workflow | None = None,
        grader: Grader | None = None,
    ) -> None:
        self._gateway = gateway
        self._workflow = workflow
        self._grader = grader
        self.seen_by_workflow: list[object] = []
        self.discovered: list[tuple[Entrypoint, ...]] = []
        self.num_gradings = 0

    async def resolve(self, declared: DeclaredPackages) -> ResolvedPackages:
        if any(line.startswith("numpy") for line in declared.dependencies):
            raise Refused(f"{declared.path}: the packages cannot be installed")
        count = len(declared.dependencies)
        return ResolvedPackages(pins="", python="3.11", platform="linux-x86_64", count=count)

    async def discover(
        self,
        snapshot: bytes,
        entrypoints: Sequence[Entrypoint],
        *,
        environments: Mapping[str, PackageEnvironment] = MappingProxyType({}),
    ) -> tuple[DiscoveredRollout, ...]:
        self.discovered.append(tuple(entrypoints))
        return tuple(
            DiscoveredRollout(
                entrypoint=e, environment=environments.get(e.rollout), error="e" * 9999
            )
            for e in entrypoints
        )

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
        self.seen_by_workflow.append((sample, prompt, metadata, base_path, api_key))
        assert self._workflow
        assert self._gateway
        return self._workflow(prompt, self._gateway.sessions[api_key])

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
        self.seen_by_workflow.append((sample, prompt, label, metadata, base_path, api_key))
        assert self._workflow
        assert self._gateway
        assert self._grader
        self._workflow(prompt, self._gateway.sessions[api_key])
        graded = self._grader(label, ())
        grades = graded.grades if isinstance(graded, GraderResult) else graded
        return ServedResult(grades[0])

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
        self.num_gradings += 1
        assert self._grader
        graded = self._grader(label, samples)
        return graded if isinstance(graded, GraderResult) else GraderResult(graded)

    async def aclose(self) -> None:
        return None


class FakeRepositories:
    """One repository with one commit. `files` are what `read_file` finds, and `changed` the paths that
    every push changes."""

    def __init__(
        self,
        tree: bytes = b"",
        *,
        refs: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        message: str = "",
        changed: tuple[str, ...] | None = None,
    ) -> None:
        self._tree = tree
        self.refs = dict(refs or {"refs/heads/main": "c" * 40})
        self.files = dict(files or {})
        self.text = message
        self.changed = changed

    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        return "c" * 40

    async def snapshot(self, workspace: str, sha: str) -> bytes:
        return self._tree

    async def check(self, url: str) -> str:
        return "main"

    async def list_refs(self, workspace: str, url: str, *, background: bool = False) -> RefList:
        digest = hashlib.sha256(repr(sorted(self.refs.items())).encode()).hexdigest()
        return RefList(refs=dict(self.refs), digest=digest, default_branch="main")

    async def read_file(self, workspace: str, sha: str, path: str, *, most: int) -> bytes | None:
        return self.files.get(path)

    async def message(self, workspace: str, sha: str) -> str:
        return self.text

    async def changed_paths(self, push: Push) -> tuple[str, ...] | None:
        return self.changed


class FakeLearner:
    """A learner whose versions are hashes of the previous version and the batch. With `drift` it acts
    like a machine that computes other bits."""

    def __init__(self, *, drift: str = "") -> None:
        self._drift = drift
        self._held: dict[str, LearnerState] = {}
        self.calls: list[str] = []

    async def initialize(self, job: LearnerJob) -> StepResult:
        self.calls.append("initialize")
        self._held[job.run] = _version(0, b"fresh")
        return StepResult(
            state=self._held[job.run],
            metrics={},
            versions={"torch": "2"},
            files={"adapter_config.json": b"{}"},
            weights_name="weights.safetensors",
        )

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        held = self._held.get(job.run)
        return held is not None and (held.step, held.weights_sha256, held.state_sha256) == (
            step,
            weights_sha256,
            state_sha256,
        )

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        self.calls.append(f"load {state.step}")
        assert state.state is not None
        self._held[job.run] = state

    async def evaluate(
        self, job: LearnerJob, step: int, rows: Sequence[LearnedRow]
    ) -> dict[str, float]:
        self.calls.append(f"evaluate {step}")
        assert self._held[job.run].step == step
        return {"eval/validation/loss": float(len(rows))}

    async def compare_gradients(
        self, job: LearnerJob, before: StepBatch, after: StepBatch
    ) -> GradientComparison:
        """Rewards as gradients: the cosine is that of the rewards themselves."""
        self.calls.append(f"compare {before.step}")
        assert self._held[job.run].step == before.step - 1
        first, second = (
            [reward or 0.0 for group in batch.groups for reward in group.rewards]
            for batch in (before, after)
        )
        norms = math.hypot(*first), math.hypot(*second)
        dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
        cosine = dot / (norms[0] * norms[1]) if all(norms) else None
        return GradientComparison(cosine, *norms, advantages=len(first), turned=0)

    async def step(
        self,
        job: LearnerJob,
        batch: StepBatch,
        *,
        export_state: bool,
        export_weights: bool = True,
    ) -> StepResult:
        self.calls.append(f"step {batch.step}")
        held = self._held.pop(job.run, None)
        if held is None or held.step != batch.step - 1:
            raise TransientError(f"version {batch.step - 1} is not loaded")
        assert held.weights is not None
        made = _version(batch.step, held.weights + repr(batch).encode() + self._drift.encode())
        self._held[job.run] = made
        exported = LearnerState(
            step=made.step,
            weights=made.weights if export_weights else None,
            weights_sha256=made.weights_sha256,
            state=made.state if export_state else None,
            state_sha256=made.state_sha256,
        )
        return StepResult(state=exported, metrics={"train/loss": 0.5}, plan=(batch.step,))


def _version(step: int, content: bytes) -> LearnerState:
    weights = hashlib.sha256(content).digest()
    state = weights + b"moments %d" % step
    return LearnerState(
        step=step,
        weights=weights,
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        state=state,
        state_sha256=hashlib.sha256(state).hexdigest(),
    )


@dataclass
class Bench:
    """Ports over a temporary directory, for tests that perform effects one after another."""

    ports: Any
    world: World
    blobs: LocalBlobs
    clock: ManualClock

    async def record(self, event: Event) -> UUID:
        """Append an event and return its id."""
        cause = uuid5(HEADRACE, str(len(self.world.events)))
        [recorded] = await self.ports.log.append([event], cause=cause)
        return recorded.id

    async def dataset(self, *rows: DatasetRow) -> DatasetRef:
        """Store a dataset with these rows and return its reference."""
        content = b"".join(row.to_line() for row in rows)
        artifact = await self.ports.artifacts.put_artifact(content, run="d1", blob=True)
        return DatasetRef(dataset="d1", name="sums", content=artifact, num_rows=len(rows))


def bench(
    directory: Path,
    *,
    sampler: FakeSampler | None = None,
    learner: FakeLearner | None = None,
    user: FakeUserCode | None = None,
    gateway: FakeGateway | None = None,
    repositories: Repositories | None = None,
    submissions: Submissions | None = None,
) -> Bench:
    """Ports with these engines and this user code."""
    world, blobs, clock = World(), LocalBlobs(directory), ManualClock()
    log = MemoryLog(world)
    artifacts = ArtifactStore(log, blobs, cache_bytes=0)
    ports = AllPorts(
        log=log,
        blobs=blobs,
        artifacts=artifacts,
        datasets=DatasetCache(artifacts),
        clock=clock,
        settings=Settings.load({"HEADRACE_HOME": str(directory)}),
        repositories=repositories,
        sampler=sampler,
        learner=learner,
        user=user,
        gateway=gateway,
        submissions=submissions,
    )
    return Bench(ports, world, blobs, clock)


def damage(uri: str) -> None:
    """Flip one bit of a blob's file, without using the blob store."""
    path = Path(uri.removeprefix("file://"))
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
