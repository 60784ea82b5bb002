"""Headrace in one process and in memory: the real consumers, trainer, sandbox and producers, over the
in-memory adapters of database, bus and blobs."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from consumers.registry import REGISTRY, lanes_of, load
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.memory import MemoryBlobs
from infra.identity.secrets.memory import MemorySecrets
from infra.model_api.gateway.server import HttpGateway
from infra.names import MemoryNames
from infra.ports.services import UserCode
from infra.repositories.git.mirrors import GitRepositories
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import service_of
from infra.sandbox.user_process import user_group
from infra.settings.git import LAPTOP
from infra.settings.settings import Settings
from infra.spine.memory.bus import MemoryBus
from infra.spine.memory.event_log import MemoryEffects, MemoryLog, World
from infra.spine.ports.clock import SystemClock
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.runtime import Runtime
from producers.core.datasets import registration
from producers.core.lookup import Lookup
from producers.core.submit import SubmitRequest, Submitter
from producers.core.workspaces import Workspaces
from schemas.events import CheckpointSaved, Event, RunFailed, RunFinished, RunRequested
from schemas.ids import WorkerId
from schemas.learner import Learner
from schemas.sampling import Sampler
from tests.kit.ports import AllPorts
from tests.kit.random_latency import RandomLatencyLearner, RandomLatencySampler

E = TypeVar("E", bound=Event)
WORKER = WorkerId("the-only-one")


@dataclass
class InMemory:
    """A platform. `world` is its database."""

    world: World
    submitter: Submitter
    workspaces: Workspaces
    names: MemoryNames
    blobs: MemoryBlobs
    artifacts: ArtifactStore
    secrets: MemorySecrets
    user: UserCode
    log: MemoryLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = MemoryLog(self.world)

    async def upload(self, name: str, file: Path) -> None:
        checked = await registration.check(file, "jsonl")
        await registration.register(
            checked,
            file,
            name=name,
            file_name=file.name,
            log=self.log,
            blobs=self.blobs,
            names=self.names,
        )

    async def run_to_end(
        self, config: dict[str, dict[str, Any]], *, workspace: str | None, key: str = "a-key"
    ) -> str:
        """Submit a run of this config, and return its id once it has finished."""
        requested = await self.submitter.submit_run(
            SubmitRequest(config, workspace=workspace), key=key
        )
        assert isinstance(requested.event, RunRequested)
        run = requested.event.run
        while not any(e.run == run for e in self.events_of(RunFinished)):
            failed = [e.message for e in self.events_of(RunFailed)]
            assert not failed, failed
            await asyncio.sleep(0.02)
        return run

    def final_adapter(self) -> str:
        """The hash of the weights of the last checkpoint."""
        weights = max(self.events_of(CheckpointSaved), key=lambda e: e.spec.step).spec.state.weights
        assert weights is not None
        return weights.sha256

    def events_of(self, kind: type[E]) -> list[E]:
        """All events of a type, in the order of the log."""
        return [r.event for r in self.world.events if isinstance(r.event, kind)]


@asynccontextmanager
async def in_memory(
    home: Path,
    *,
    latency_seed: int | None = None,
    vllm: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[InMemory]:
    """A platform that works until the block ends. `latency_seed`: the seed of how much longer samples
    and steps take; None: no longer. `vllm`: the servers that sample, if any. `environ`: more
    settings."""
    from trainer.engine import Engine
    from trainer.sampler.vllm.fleet import VllmServers

    world, blobs, names = World(), MemoryBlobs(), MemoryNames()
    secrets = MemorySecrets()
    world.workers[WORKER] = world.now.replace(year=2100)
    log = MemoryLog(world)
    artifacts = ArtifactStore(log, blobs)
    settings = Settings.load({"HEADRACE_HOME": str(home), **(environ or {})})
    repositories = GitRepositories(home / "git", settings=LAPTOP)
    async with AsyncExitStack() as stack:
        servers = VllmServers(vllm, home / "adapters") if vllm else None
        engine = Engine(fetch=artifacts.get_artifact, vllm=servers)
        stack.push_async_callback(engine.aclose)
        sampler: Sampler = engine.sampler
        learner: Learner = engine.learner
        if latency_seed is not None:
            sampler = RandomLatencySampler(engine.sampler, latency_seed)
            learner = RandomLatencyLearner(engine.learner, latency_seed)
        gateway = HttpGateway(sampler, group=user_group())
        await gateway.start()
        stack.push_async_callback(gateway.aclose)
        user = SandboxClient(service_of(settings), fetch=artifacts.get_artifact, sockets=gateway)
        await user.start()
        stack.push_async_callback(user.aclose)
        consumers = tuple(load(name) for name in REGISTRY)
        runtime = Runtime(
            Hosting(WORKER, consumers, lanes_of(consumers)),
            log=log,
            effects=MemoryEffects(world),
            bus=MemoryBus(world),
            ports=AllPorts(
                log=log,
                blobs=blobs,
                artifacts=artifacts,
                datasets=DatasetCache(artifacts),
                clock=SystemClock(),
                settings=settings,
                repositories=repositories,
                sampler=sampler,
                learner=learner,
                user=user,
                gateway=gateway,
                secrets=secrets,
            ).build,
            artifacts=artifacts,
            clock=SystemClock(),
            wakeup=Wakeup(),
        )
        task = asyncio.ensure_future(runtime.run())
        workspaces = Workspaces(log, names, repositories)
        submitter = Submitter(
            log, names, lookup=Lookup(log, names), workspaces=workspaces, secrets=secrets
        )
        try:
            yield InMemory(world, submitter, workspaces, names, blobs, artifacts, secrets, user)
        finally:
            runtime.stop()
            await task
