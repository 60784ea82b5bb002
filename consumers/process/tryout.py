"""A composition root: tries a rollout in this process, without a server and without a database.

A row is sampled and graded by the same consumers, gateway, sandbox and engine as in training. Only the
stores are in memory, and nothing outlives the process. The engine (torch) is built unless the model is a
provider's.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from consumers import grade
from consumers.evaluation_figures import RowOutcome, evaluation_figures, failed_by_policy
from consumers.grade import GradePorts
from consumers.rollout import sampling
from consumers.rollout.sampling import RolloutPorts
from consumers.run.start import rollout_of
from consumers.sync.discovery import discover_rollouts
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.memory import MemoryBlobs
from infra.model_api.gateway.provider_sampler import FindKey, ProviderSampler, RoutedSampler
from infra.model_api.gateway.server import HttpGateway
from infra.model_api.judgements import MemoryJudgements
from infra.model_api.provider_usage import MemoryProviderUsage
from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.judges import ProviderJudges
from infra.model_api.providers.teachers import VllmTeachers
from infra.ports.secrets import SecretStore
from infra.ports.services import Datasets
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import service_of
from infra.sandbox.user_process import user_group
from infra.settings.model_directories import DEQUANTIZED
from infra.settings.settings import Settings
from infra.spine.memory.event_log import MemoryLog, World
from schemas.artifact_refs import ArtifactRef
from schemas.config import EvalConfig, RunConfig
from schemas.datasets import DatasetRow
from schemas.effects import GenerateGroup, GenerateSample, GradeGroup, SampleFinished
from schemas.errors import FailureCategory, Refused, TransientError
from schemas.ids import GroupKey, Purpose
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import (
    Grade,
    Judgement,
    JudgementBatch,
    Message,
    SampleBatch,
    SampleFailure,
    SampleOutput,
    Sampler,
    SampleRecord,
    SampleRequest,
    ToolSpec,
    Turn,
)
from schemas.specs import (
    DatasetRef,
    DiscoveredRollout,
    Entrypoint,
    GroupSpec,
    GroupTemplate,
    RolloutRef,
    SampleEntry,
)

T = TypeVar("T")

OWNER = "tryout"
NO_COMMIT = "0" * 40
TRIES = 5
"""How often an attempt that the platform failed is made again."""


@dataclass(frozen=True, slots=True)
class TriedRow:
    """The samples of one row with their grades, in the order of their index. `grader_output` is what the
    grader left behind, if anything, and `judgements` are those of the rubrics."""

    row: int
    samples: tuple[SampleRecord, ...]
    grades: tuple[Grade, ...]
    grader_output: SampleOutput | None
    judgements: tuple[Judgement, ...] = ()


class _Rows:
    """`infra.ports.services.Datasets` with one dataset."""

    def __init__(self) -> None:
        self.held: Sequence[DatasetRow] = ()

    async def rows(self, ref: DatasetRef) -> Sequence[DatasetRow]:
        return self.held


class _NoEngine:
    """`schemas.sampling.Sampler` of a process whose model is a provider's."""

    async def sample(self, request: SampleRequest) -> Turn:
        raise RuntimeError("this process has no engine; its model is a provider's")

    async def prepare(self, request: SampleRequest) -> None:
        raise RuntimeError("this process has no engine; its model is a provider's")


class _NoScorer:
    """`schemas.models.reward_model.Scorer` of a process without checkpoints of runs (`rollout_ref`)."""

    async def score(
        self, model: RewardModelSpec, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> float:
        raise RuntimeError("this process has no reward models")


class Tryout:
    """Tries rows of a dataset. Get one from `open_tryout`."""

    def __init__(self, sampling: RolloutPorts, grading: GradePorts, rows: _Rows) -> None:
        self._sampling, self._grading = sampling, grading
        self._rows = rows

    async def store(self, data: bytes) -> ArtifactRef:
        """Store bytes that the rollout or the model needs (a snapshot, a checkpoint's file)."""
        return await self._grading.artifacts.put_artifact(data, run=OWNER)

    async def read(self, ref: ArtifactRef) -> bytes:
        """Return the bytes of an artifact, for example of a file that a workflow left behind."""
        return await self._grading.artifacts.get_artifact(ref)

    async def discover(
        self, snapshot: bytes, entrypoints: Sequence[Entrypoint]
    ) -> tuple[DiscoveredRollout, ...]:
        """Return the definitions of entry points, or why they cannot be used, as sync would."""
        return await discover_rollouts(
            snapshot,
            entrypoints,
            user=self._grading.user,
            artifacts=self._grading.artifacts,
            owner=OWNER,
        )

    def use_rows(self, rows: Sequence[DatasetRow]) -> None:
        """Take the rows of the dataset that `try_row` uses."""
        self._rows.held = rows

    async def try_row(
        self, row: int, template: GroupTemplate, *, slot: int | None = None
    ) -> TriedRow:
        """Sample and grade one row. An error of user code is in the result. Its draws are those of the
        slot, by default the row's own number. Raises TransientError when the platform failed several
        times."""
        key = GroupKey(OWNER, Purpose.EVALUATE, 0, row if slot is None else slot)
        spec = GroupSpec(group=str(key), row=row, template=template)
        parts, entries = await self._sample(spec)
        effect = GradeGroup(spec=spec, parts=parts, entries=entries)
        graded = await _settle(lambda: grade.perform(effect, self._grading))
        batch = SampleBatch.model_validate_json(await self.read(graded.group_artifact))
        judged: tuple[Judgement, ...] = ()
        if graded.judgements is not None:
            data = await self.read(graded.judgements)
            judged = JudgementBatch.model_validate_json(data).judgements
        return TriedRow(row, batch.samples, graded.grades, batch.grader_output, judged)

    async def _sample(
        self, spec: GroupSpec
    ) -> tuple[tuple[ArtifactRef, ...], tuple[SampleEntry, ...]]:
        rollout = spec.template.rollout
        if rollout is None or not rollout.makes_attempts:
            effect = GenerateGroup(spec=spec)
            group = await _settle(lambda: sampling.generate_group(effect, self._sampling))
            return (group.artifact,), group.entries
        indices = range(spec.template.num_samples)
        made = await asyncio.gather(
            *(self._attempt(GenerateSample(spec=spec, index=index)) for index in indices)
        )
        return tuple(one.artifact for one in made), tuple(one.entry for one in made)

    async def _attempt(self, effect: GenerateSample) -> SampleFinished:
        return await _settle(lambda: sampling.generate_sample(effect, self._sampling))


def lost_row(row: int, template: GroupTemplate, error: Exception) -> TriedRow:
    """The result of a row that the platform could not try."""
    failure = SampleFailure(category=FailureCategory.INTERNAL, message=str(error))
    indices = range(template.num_samples)
    samples = tuple(SampleRecord(index=index, failure=failure) for index in indices)
    grades = tuple(Grade(index=index, reward=None, failure=failure) for index in indices)
    return TriedRow(row, samples, grades, None)


def outcome_of(tried: TriedRow) -> RowOutcome:
    """How the attempts at a row count in the figures of an evaluation."""
    failures = (sample.failure for sample in tried.samples)
    failed = failed_by_policy(failure.category if failure else None for failure in failures)
    return RowOutcome(tuple(grade.reward for grade in tried.grades), failed)


def figures_of(
    tried: Sequence[TriedRow], *, n: int, threshold: float
) -> tuple[float | None, dict[str, float]]:
    """The mean reward and the figures of an evaluation, as the platform computes them."""
    outcomes = {slot: outcome_of(one) for slot, one in enumerate(tried)}
    mean, figures = evaluation_figures(outcomes, n=n, threshold=threshold)
    samples = [sample for one in tried for sample in one.samples]
    figures["eval/tokens"] = float(sum(sample.completion_tokens for sample in samples))
    if usd := sum(sample.usd or 0.0 for sample in samples):
        figures["eval/usd"] = usd
    return mean, figures


async def _settle(work: Callable[[], Awaitable[T]]) -> T:
    """Do work, and do it again when the platform failed, as the runtime does."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(TransientError):
            return await work()
    return await work()


def rollout_ref(
    config: RunConfig | EvalConfig,
    entrypoint: Entrypoint,
    discovered: Sequence[DiscoveredRollout],
    snapshot: ArtifactRef,
) -> RolloutRef:
    """Return the rollout of a config as a run would use it. Raises Refused when the entry point cannot
    be used with this config, and for a config with reward models, whose checkpoints are on a server."""
    if isinstance(config, RunConfig) and config.advanced.reward_models:
        raise Refused(
            "advanced.reward_models are checkpoints of a server, which a try does not have; leave them "
            "out to try the rollout, and submit a run with max_steps = 1 to try them"
        )
    return rollout_of(
        config, entrypoint, discovered, snapshot=snapshot, commit=NO_COMMIT, workspace=OWNER
    )


@asynccontextmanager
async def open_tryout(
    settings: Settings, *, with_engine: bool, find_key: FindKey, secrets: SecretStore
) -> AsyncIterator[Tryout]:
    """Open the engine, the gateway and the sandbox, and close them after the block. `find_key` returns
    the keys of providers, and `secrets` holds those of the rollout. Without an engine, only models of
    providers can be sampled. Raises InvalidConfig when user code cannot be confined on this machine."""
    log, blobs, rows = MemoryLog(World()), MemoryBlobs(), _Rows()
    artifacts = ArtifactStore(log, blobs)
    async with AsyncExitStack() as stack:
        models = settings.home / DEQUANTIZED if with_engine else None
        sampler = await _open_sampler(stack, artifacts, find_key, models=models)
        gateway = HttpGateway(sampler, group=user_group(), network=settings.network)
        await gateway.start()
        stack.push_async_callback(gateway.aclose)
        user = SandboxClient(service_of(settings), fetch=artifacts.get_artifact, sockets=gateway)
        stack.push_async_callback(user.aclose)
        await user.start()
        client = ProviderClient(None)
        judges = ProviderJudges(client)
        stack.push_async_callback(judges.aclose)
        datasets: Datasets = rows
        yield Tryout(
            RolloutPorts(
                sampler, gateway, user, secrets, datasets, artifacts, _NoScorer(), log=log
            ),
            GradePorts(
                datasets, secrets, judges, MemoryJudgements(), artifacts, user, VllmTeachers(client)
            ),
            rows,
        )


async def _open_sampler(
    stack: AsyncExitStack,
    artifacts: ArtifactStore,
    find_key: FindKey,
    *,
    models: Path | None,
) -> Sampler:
    """A sampler of providers' models, and of others if there is a directory for `models`."""
    engine: Sampler = _NoEngine()
    if models is not None:
        from trainer.engine import Engine

        opened = Engine(fetch=artifacts.get_artifact, read=artifacts.read, models=models)
        stack.push_async_callback(opened.aclose)
        engine = opened.sampler
    providers = ProviderClient(None)  # the person who tries a rollout is the operator here
    stack.push_async_callback(providers.aclose)
    return RoutedSampler(engine, ProviderSampler(providers, find_key, MemoryProviderUsage()))
