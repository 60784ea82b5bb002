"""The ports of a worker process. It opens those that its consumers name. A process with an engine also
opens a gateway, through which people chat with checkpoints.

A consumer names its ports as the fields of a dataclass (`Consumer.ports`). The name of a field says
which port it is, in all consumers.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from infra.adapters import Backend
from infra.blobs.hub.uploads import HubUploads
from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import PostgresSecrets
from infra.model_api.gateway.provider_sampler import ProviderSampler, RoutedSampler, stored_keys
from infra.model_api.gateway.server import HttpGateway
from infra.model_api.judgements import PostgresJudgements
from infra.model_api.provider_usage import PostgresProviderUsage
from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.judges import ProviderJudges
from infra.model_api.providers.teachers import VllmTeachers
from infra.names import check_one_workspace
from infra.readmodel.worker_chats import WorkerChats
from infra.repositories.forge_connections import ForgeConnections
from infra.repositories.forges.api import ForgeApis
from infra.repositories.git.confinement import find_confinement
from infra.repositories.git.credentials import CredentialSource
from infra.repositories.git.mirrors import GitRepositories
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import service_of
from infra.sandbox.user_process import user_group
from infra.settings.model_directories import DEQUANTIZED
from infra.settings.settings import Settings
from infra.spine.ports.artifacts import Artifacts
from infra.spine.runtime.consumer import AnyConsumer, PortsOf
from infra.spine.runtime.hosting import Hosting
from schemas.costs.work import CPU
from schemas.effects import Lane
from schemas.ids import WorkerId
from schemas.sampling import Sampler

if TYPE_CHECKING:
    from trainer.engine import Engine

ARTIFACTS = "artifacts"
"""The only port that each effect has for itself, because its commit writes the small ones."""

SECRETS_S = 3.0
"""How long a worker may use the value of a secret that was replaced or deleted."""


def port_names(hosting: Hosting) -> frozenset[str]:
    """The names of the ports that the consumers use whose effects this process performs."""
    lanes = set(hosting.lanes)
    return frozenset(
        field.name
        for consumer in hosting.consumers
        if consumer.ports and lanes & {effect.lane for effect in consumer.effects}
        for field in fields(consumer.ports)
    )


def ports_from(available: Mapping[str, object]) -> PortsOf:
    """Return what builds the ports of each consumer from these, by name. It raises RuntimeError when one
    is missing, because such a process must not claim the consumer's effects."""

    def build(consumer: AnyConsumer, artifacts: Artifacts) -> object:
        given = {**available, ARTIFACTS: artifacts}
        names = [field.name for field in fields(consumer.ports)] if consumer.ports else []
        if missing := [name for name in names if name not in given]:
            raise RuntimeError(
                f"this process has no port {', '.join(missing)}, which {consumer.name} names: correct "
                "the name, or the lanes of this process, which should not have claimed the effect"
            )
        return consumer.ports and consumer.ports(**{name: given[name] for name in names})

    return build


@dataclass(frozen=True, slots=True)
class OpenPorts:
    """The ports of a process by name, how many samples it computes at once (None: it has no engine), and
    the kind of device of its engine."""

    by_name: Mapping[str, object]
    num_samples: int | None = None
    device: str = CPU


async def open_ports(
    stack: AsyncExitStack,
    hosting: Hosting,
    backend: Backend,
    settings: Settings,
    given: Mapping[str, object],
) -> OpenPorts:
    """Open the ports that `hosting` needs and that are not `given`. They are closed with the stack.
    Raises InvalidConfig when the settings do not allow one."""
    names, lanes = port_names(hosting) - set(given), set(hosting.lanes)
    ports: dict[str, object] = {
        "log": backend.log,
        "blobs": backend.blobs,
        "datasets": backend.datasets,
        "clock": backend.clock,
        "settings": settings,
    }
    gateway: HttpGateway | None = None
    num_samples: int | None = None
    device = CPU
    secrets: PostgresSecrets | None = None
    if "secrets" in names:
        sealer = Sealer.of(settings)
        ports["secrets"] = secrets = PostgresSecrets(backend.database, sealer, cache_s=SECRETS_S)
    if lanes & {Lane.GENERATE, Lane.TRAIN}:
        engine = _open_engine(stack, backend, settings)
        sampler: Sampler = engine.sampler
        num_samples = engine.concurrency
        device = engine.device_kind
        ports |= {"learner": engine.learner, "scorer": engine.scorer}
        if secrets is not None:  # they hold the keys of model providers
            sampler = _with_providers(stack, sampler, secrets, backend, settings)
        ports["sampler"] = sampler
        ports["gateway"] = gateway = await _open_gateway(
            stack, sampler, hosting.worker, backend, settings
        )
    if Lane.SERVE in lanes:
        from consumers.process.serving import open_serving

        serving = await open_serving(stack, hosting.worker, backend, settings)
        ports.setdefault("sampler", serving)
    if "user" in names:
        await check_one_workspace(backend.database, settings)
        ports["user"] = user = SandboxClient(
            service_of(settings),
            fetch=backend.artifacts.get_artifact,
            sockets=gateway,
            level=settings.sandbox,
        )
        stack.push_async_callback(user.aclose)
        await user.start()
    if names & {"judges", "teachers"}:
        client = ProviderClient(settings.network)
        stack.push_async_callback(client.aclose)
        ports |= {"judges": ProviderJudges(client), "teachers": VllmTeachers(client)}
        ports["judgements"] = PostgresJudgements(backend.database)
    if "repositories" in names:
        ports["repositories"] = repositories = GitRepositories(
            settings.home / "git",
            await _credentials(stack, backend, settings),
            settings=settings.git,
            confinement=await asyncio.to_thread(find_confinement, settings.sandbox),
        )
        await repositories.collect()
    if "hub" in names:
        ports["hub"] = HubUploads(settings.hub_endpoint)
    return OpenPorts({**ports, **given}, num_samples, device)


def _open_engine(stack: AsyncExitStack, backend: Backend, settings: Settings) -> "Engine":
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
    engine = Engine(
        fetch=artifacts.get_artifact,
        read=artifacts.read,
        vllm=servers,
        gpu_share=share,
        models=settings.home / DEQUANTIZED,
    )
    stack.push_async_callback(engine.aclose)
    return engine


def _with_providers(
    stack: AsyncExitStack,
    sampler: Sampler,
    secrets: PostgresSecrets,
    backend: Backend,
    settings: Settings,
) -> Sampler:
    """A sampler that also asks the models of providers."""
    providers = ProviderClient(settings.network)
    stack.push_async_callback(providers.aclose)
    usage = PostgresProviderUsage(backend.database)
    return RoutedSampler(sampler, ProviderSampler(providers, stored_keys(secrets), usage))


async def _open_gateway(
    stack: AsyncExitStack, sampler: Sampler, worker: WorkerId, backend: Backend, settings: Settings
) -> HttpGateway:
    chats = WorkerChats(backend.database)
    gateway = HttpGateway(
        sampler,
        group=user_group(),
        network=settings.network,
        redeem=partial(chats.redeem, worker=worker),
    )
    await gateway.start()
    stack.push_async_callback(gateway.aclose)
    await chats.announce(worker, gateway.internal_url)
    return gateway


async def _credentials(
    stack: AsyncExitStack, backend: Backend, settings: Settings
) -> CredentialSource:
    """The credentials of connected repositories."""
    connections = ForgeConnections(backend.database, Sealer.of(settings))
    forges = ForgeApis(
        connections.get_connection, public_url=settings.public_url, allowed=settings.git.addresses
    )
    await stack.enter_async_context(forges)
    return forges.git_credentials
