"""A composition root: builds the adapters and engines of a worker process for the consumers it hosts.

The engine (torch) is built only for a process that takes the lanes of a device. The sandbox and the
gateway are built only where samples are generated or graded.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from uuid import uuid4

from infra import failpoints, telemetry
from infra.adapters import Backend, open_backend
from infra.blobs.hub.uploads import HubUploads
from infra.gateway.provider_sampler import ProviderSampler, RoutedSampler, stored_keys
from infra.gateway.server import HttpGateway
from infra.git.confinement import find_confinement
from infra.git.credentials import CredentialSource
from infra.git.forges.api import ForgeApis
from infra.git.mirrors import GitRepositories
from infra.http.providers.client import ProviderClient
from infra.http.providers.judges import ProviderJudges
from infra.local import gc_freeze
from infra.ports.ports import Ports
from infra.ports.services import Forges, Repositories, Submissions
from infra.postgres.connections import Connections
from infra.postgres.keys.sealed import Sealer
from infra.postgres.lease import LEASE_LOST, LeaseKeeper, leave
from infra.postgres.names import check_one_workspace
from infra.postgres.notify import News
from infra.postgres.secrets import PostgresSecrets
from infra.readmodel.worker_chats import WorkerChats
from infra.runtime.consumer import AnyConsumer
from infra.runtime.hosting import Hosting, capacity_of
from infra.runtime.judgements import PostgresJudgements
from infra.runtime.provider_usage import PostgresProviderUsage
from infra.runtime.runtime import Runtime
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.ways import service_of
from infra.sandbox.user_process import user_group
from infra.settings.quotas import SAMPLES
from infra.settings.settings import Settings
from schemas.effects import Lane
from schemas.errors import InvalidConfig
from schemas.ids import WorkerId
from schemas.sampling import Sampler

logger = logging.getLogger(__name__)

MOST_FILES = 16384

SYNC = "sync"
SECRETS_S = 3.0
"""How long a worker may use the value of a secret that was replaced or deleted."""


def worker_id() -> WorkerId:
    """Return the name under which this process holds claims: the supervisor's choice, or a new one."""
    supervisor_name = os.environ.get("HEADRACE_WORKER_ID")
    return WorkerId(supervisor_name or f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}")


def raise_file_limit() -> None:
    """Let this process open as many files as it may, at most MOST_FILES, because each request of a
    workflow has a connection. Many systems allow 1,024 unless a process asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def work(consumers: Sequence[AnyConsumer], *, lanes: Sequence[Lane], drain: bool) -> int:
    """Host `consumers` until stopped, or with `drain` until nothing is left. Returns an exit code."""
    settings = Settings.load(os.environ)
    raise_file_limit()
    telemetry.setup(settings, service="+".join(consumer.name for consumer in consumers))
    failpoints.arm(settings.failpoint or "", settings.home)
    hosting = Hosting(worker=worker_id(), consumers=tuple(consumers), lanes=tuple(lanes))
    async with (
        open_backend(settings) as backend,
        open_runtime(hosting, backend, settings) as runtime,
    ):
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, runtime.stop)
        async with hold_lease(hosting, backend, runtime) as keeper:
            logger.info("worker %s hosts %s", hosting.worker, [c.name for c in consumers])
            await runtime.run(drain=drain)
            await asyncio.to_thread(telemetry.close)
            return LEASE_LOST if keeper.lost else 0


async def relay(consumers: Sequence[str]) -> int:
    """Publish the log to Kafka for these consumers, until stopped. Raises InvalidConfig when
    HEADRACE_KAFKA is not set."""
    settings = Settings.load(os.environ)
    telemetry.setup(settings, service="relay")
    failpoints.arm(settings.failpoint or "", settings.home)
    if settings.kafka is None:
        raise InvalidConfig(
            "the relay publishes to Kafka, and HEADRACE_KAFKA is not set; name the servers there"
        )
    async with open_backend(settings) as backend:
        task = asyncio.ensure_future(backend.relay(settings.kafka, consumers).run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return 0


@asynccontextmanager
async def hold_lease(
    hosting: Hosting, backend: Backend, runtime: Runtime
) -> AsyncIterator[LeaseKeeper]:
    """Hold this worker's lease inside the block. Each heartbeat also applies the gates of runs. When the
    lease is lost, the runtime stops."""
    loop = asyncio.get_running_loop()

    def beat() -> None:
        asyncio.run_coroutine_threadsafe(_apply_gates(runtime), loop)

    def stop_working() -> None:
        loop.call_soon_threadsafe(runtime.stop)

    keeper = LeaseKeeper(
        backend.database.url,
        hosting.worker,
        lanes=hosting.lanes,
        on_beat=beat,
        on_lost=stop_working,
        on_overdue=leave,
    )
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.stop()


async def _apply_gates(runtime: Runtime) -> None:
    """Apply the gates. Nobody awaits this call, so an error is logged here, and the next heartbeat tries
    again."""
    try:
        await runtime.apply_gates()
    except Exception:  # as said above
        logger.exception("the gates could not be applied")


@dataclass(frozen=True, slots=True)
class ControlPorts:
    """The ports that the control process builds itself and gives to its runtime."""

    repositories: Repositories
    forges: Forges
    submissions: Submissions


@asynccontextmanager
async def open_runtime(
    hosting: Hosting, backend: Backend, settings: Settings, *, control: ControlPorts | None = None
) -> AsyncIterator[Runtime]:
    """Open a runtime with the adapters and engines that its lanes need, and close them after the block.
    Only the control process has `control`."""
    async with AsyncExitStack() as stack:
        ports, num_samples = await _open_ports(stack, hosting, backend, settings)
        hosting = replace(
            hosting,
            capacity=capacity_of(settings.capacity, generate=num_samples),
            run_capacity={Lane(lane): most for lane, most in settings.run_capacity.items()},
            workspace_samples=settings.quotas.get(SAMPLES),
        )
        if control is not None:
            ports = replace(
                ports,
                repositories=control.repositories,
                forges=control.forges,
                submissions=control.submissions,
            )
        gc_freeze.freeze()
        runtime = Runtime(
            hosting,
            log=backend.log,
            effects=backend.effects,
            bus=backend.bus(),
            ports=ports,
            artifacts=backend.artifacts,
            wakeup=backend.notifier.subscribe(News.WORK),
        )
        yield runtime


async def _open_ports(
    stack: AsyncExitStack, hosting: Hosting, backend: Backend, settings: Settings
) -> tuple[Ports, int | None]:
    """Return the ports, and how many samples this process computes at once (None: it has no engine)."""
    lanes = set(hosting.lanes)
    sampler: Sampler | None = None
    num_samples: int | None = None
    learner, gateway, user, repositories, secrets = None, None, None, None, None
    judges, judgements = None, None
    if lanes & {Lane.GENERATE, Lane.TRAIN}:
        from trainer.engine import Engine
        from trainer.sampler.vllm.fleet import VllmServers

        vllm = settings.vllm
        servers = VllmServers(vllm.urls, vllm.adapters, vllm.api_key) if vllm else None
        share = None
        if servers and vllm and vllm.server:
            num_seqs = vllm.server.max_num_seqs or servers.max_num_seqs
            servers = replace(servers, max_num_seqs=num_seqs)
            share = vllm.server.learner_share(2 if settings.workers == "two" else 1)
        artifacts = backend.artifacts
        engine = Engine(fetch=artifacts.get, read=artifacts.read, vllm=servers, gpu_share=share)
        stack.push_async_callback(engine.aclose)
        sampler, learner = engine.sampler, engine.learner
        num_samples = engine.concurrency
    if lanes & {Lane.USER, Lane.GENERATE, Lane.EXPORT}:
        secrets = PostgresSecrets(backend.database, Sealer.of(settings), cache_s=SECRETS_S)
    if sampler is not None and secrets is not None:
        providers = ProviderClient(settings.network)
        stack.push_async_callback(providers.aclose)
        usage = PostgresProviderUsage(backend.database)
        sampler = RoutedSampler(sampler, ProviderSampler(providers, stored_keys(secrets), usage))
    if sampler is not None:
        chats = WorkerChats(backend.database)
        gateway = HttpGateway(
            sampler,
            group=user_group(),
            network=settings.network,
            redeem=partial(chats.redeem, worker=hosting.worker),
        )
        await gateway.start()
        stack.push_async_callback(gateway.aclose)
        await chats.announce(hosting.worker, gateway.internal_url)
    if Lane.SERVE in lanes:
        from consumers.process.serving import open_serving

        serving = await open_serving(stack, hosting.worker, backend, settings)
        sampler = sampler or serving
    if needs_user_code(hosting):
        await check_one_workspace(backend.database, settings)
        user = SandboxClient(
            service_of(settings),
            fetch=backend.artifacts.get,
            sockets=gateway,
            level=settings.sandbox,
        )
        stack.push_async_callback(user.aclose)
        await user.start()
    if Lane.USER in lanes:
        judges = ProviderJudges(ProviderClient(settings.network))
        stack.push_async_callback(judges.aclose)
        judgements = PostgresJudgements(backend.database)
    if Lane.CONTROL in lanes:
        repositories = GitRepositories(
            settings.home / "git",
            await _credentials(stack, backend, settings),
            settings=settings.git,
            confinement=await asyncio.to_thread(find_confinement, settings.sandbox),
        )
        await repositories.collect()
    ports = Ports(
        log=backend.log,
        blobs=backend.blobs,
        artifacts=backend.artifacts,
        datasets=backend.datasets,
        clock=backend.clock,
        settings=settings,
        repositories=repositories,
        sampler=sampler,
        learner=learner,
        user=user,
        gateway=gateway,
        secrets=secrets,
        judges=judges,
        judgements=judgements,
        hub=HubUploads(settings.hub_endpoint) if Lane.EXPORT in lanes else None,
    )
    return ports, num_samples


def needs_user_code(hosting: Hosting) -> bool:
    """Whether a process runs user code, or looks for it in new commits."""
    is_sync = Lane.CONTROL in hosting.lanes and any(c.name == SYNC for c in hosting.consumers)
    return is_sync or bool({Lane.USER, Lane.GENERATE} & set(hosting.lanes))


async def _credentials(
    stack: AsyncExitStack, backend: Backend, settings: Settings
) -> CredentialSource:
    """The credentials of connected repositories."""
    connections = Connections(backend.database, Sealer.of(settings))
    forges = ForgeApis(
        connections.get, public_url=settings.public_url, allowed=settings.git.addresses
    )
    await stack.enter_async_context(forges)
    return forges.git_credentials
