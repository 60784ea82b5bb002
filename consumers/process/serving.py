"""Builds what a process that serves deployments needs: the engine, the gateway for control processes,
and the task that loads what is deployed.

The engine is the sampler of training, in a process of its own. So a request never waits for a learner,
and a crash of one does not end the other.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from consumers.deploy.loading import first_request
from infra.adapters import Backend
from infra.model_api.serving.call import PATH
from infra.model_api.serving.grants import KnownKeys, ServingDoors
from infra.model_api.serving.sessions import DeploymentSessions, deployment_gateway
from infra.model_api.serving.training_watch import TrainingWatch
from infra.model_api.serving.usage import UsageCounts
from infra.readmodel.deployments import Deployments
from infra.settings.model_directories import DEQUANTIZED
from infra.settings.settings import Settings
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from schemas.deployments import ServedModel
from schemas.errors import HeadraceError
from schemas.ids import WorkerId
from schemas.sampling import Sampler

logger = logging.getLogger(__name__)

SPARE_VERSIONS = 3
"""Versions beyond the deployments that stay on the device, for those that are being replaced."""
MOST_ANSWERS = 256
"""How many calls are sampled at the same time: as many answers as a vLLM server samples together. While
a run trains on vLLM servers, it is only the share of them that serving may take."""
AGAIN_S = 1.0
PATIENCE_S = 5.0
"""How many seconds a request waits for a vLLM server before it is refused."""


async def open_serving(
    stack: AsyncExitStack, worker: WorkerId, backend: Backend, settings: Settings
) -> Sampler:
    """Open the engine and the gateway of this process, and close them with the stack. Returns the
    sampler."""
    watch = TrainingWatch(backend.database, share_percent=settings.serving.share_percent)
    sampler = await _open_sampler(stack, backend, settings, watch)
    usage = UsageCounts(backend.database)
    doors = ServingDoors(backend.database)
    sessions = DeploymentSessions(
        is_known=KnownKeys(doors, worker).is_valid,
        usage=usage,
        look=watch.look,
        most=lambda: max(1, int(MOST_ANSWERS * (watch.share() if settings.vllm else 1))),
    )
    host, port = settings.serving.host, settings.serving.port
    gateway = deployment_gateway(sampler, sessions, host=host, port=port)
    await gateway.start()
    stack.push_async_callback(usage.write)
    stack.push_async_callback(gateway.aclose)
    await doors.announce(worker, gateway.url + PATH)
    restoring = Restoring(Deployments(backend.database), sampler, sessions)
    jobs = (usage.run(), restoring.run(), sessions.keep_looking())
    tasks = [asyncio.ensure_future(job) for job in jobs]
    stack.push_async_callback(_end, tasks)
    return sampler


async def _open_sampler(
    stack: AsyncExitStack, backend: Backend, settings: Settings, watch: TrainingWatch
) -> Sampler:
    from trainer.engine import Engine
    from trainer.sampler.vllm.fleet import VllmServers

    vllm, serving = settings.vllm, settings.serving
    versions = max(1, serving.max_deployments) + SPARE_VERSIONS
    servers = None
    if vllm is not None:
        servers = VllmServers(
            vllm.urls, vllm.adapters, vllm.api_key, patience_s=PATIENCE_S, kept=versions
        )
    share = serving.share_percent / 100
    engine = Engine(
        fetch=backend.artifacts.get_artifact,
        read=backend.artifacts.read,
        vllm=servers,
        gpu_share=share if share < 1 else None,
        time_share=watch.share,
        versions=versions,
        models=settings.home / DEQUANTIZED,
    )
    stack.push_async_callback(engine.aclose)
    return engine.sampler


@dataclass(slots=True)
class Restoring:
    """Loads what is deployed when a process starts. What cannot be loaded is left to its requests, which
    get the reason."""

    deployments: Deployments
    sampler: Sampler
    sessions: DeploymentSessions

    async def run(self) -> None:
        """Load everything, and then let calls in."""
        for served in await self._find():
            try:
                await self.sampler.sample(first_request(served))
                logger.info("deployment %s serves %s", served.name, served.ref)
            except HeadraceError as error:
                logger.warning("deployment %s could not be loaded: %s", served.name, error)
        self.sessions.is_ready = True

    async def _find(self) -> list[ServedModel]:
        """Everything that is deployed, once the database answers."""
        while True:
            try:
                return await self.deployments.active()
            except UNAVAILABLE_ERRORS as error:
                logger.warning("the deployments cannot be read now: %s", error)
            await asyncio.sleep(AGAIN_S)


async def _end(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
