"""The control process: the API, the consumers that follow pushes (sync, trigger, status), the read
model's projector and (with Kafka) the relay, in one event loop. It never imports torch.

This is a composition root. Beside it only producers/tryout/ may import consumers.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette

from consumers.process.worker import hold_lease, open_runtime, worker_id
from consumers.project.consumer import Projector
from consumers.registry import CONTROL_CONSUMERS, REGISTRY, lanes_of, load
from infra import failpoints, telemetry
from infra.adapters import Backend, open_backend
from infra.blobs.garbage import collecting
from infra.http.failed_auth_throttle import FailedAuthThrottle
from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.identity.audit import record_access
from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import LEFT_S
from infra.names import check_one_workspace
from infra.operations.local.child import AWAY
from infra.operations.maintenance.alerts import Alerts, alert_alone
from infra.operations.maintenance.archive import Archives
from infra.readmodel.stalled_effects import watch_stalled_effects
from infra.readmodel.store import ReadModel
from infra.repositories.forge_connections import ForgeConnections
from infra.repositories.forges.api import ForgeApis
from infra.repositories.git.confinement import find_confinement
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.smart_http import SmartHttp
from infra.sandbox.service.self_protection import hide_memory
from infra.settings.settings import BadSetting, Settings
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.runtime import Runtime
from infra.task_cancellation import end, go_on
from producers.core.repositories.mirror_collection import collect_mirrors
from producers.core.repositories.polling import poll_alone
from producers.core.retention import archive_periodically, remove_records_periodically
from producers.core.run_submissions import RunSubmissions
from producers.dashboard import routes as dashboard
from producers.dialects.osmosis.room import osmosis
from producers.http.app import Dialect, create_app
from producers.http.services import Services
from schemas.errors import InvalidConfig, TransientError

logger = logging.getLogger(__name__)

LIMITS = ConnectionLimits(head_s=10, body_s=60, body_rate=16 << 10, dropped=16 << 20)
"""Limits of connections to the API. Request bodies may be large files over slow connections."""
STOPPING_S = 5.0
"""How long the API may take to stop."""


async def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code of the process."""
    consumers = tuple(load(name) for name in CONTROL_CONSUMERS)
    hosting = Hosting(worker=worker_id(), consumers=consumers, lanes=lanes_of(consumers))
    async with (
        open_backend(settings) as backend,
        _open_forges(backend, settings) as forges,
        SmartHttp(settings.git.addresses) as smart_http,
    ):
        await check_one_workspace(backend.database, settings)
        git = settings.home / "git"
        repositories = GitRepositories(
            git,
            forges.git_credentials,
            settings=settings.git,
            smart_http=smart_http,
            confinement=await asyncio.to_thread(find_confinement, settings.sandbox),
        )
        services = _services(backend, settings, forges, repositories)
        given = {
            "repositories": services.repositories,
            "forges": forges,
            "submissions": RunSubmissions(
                services.submitter,
                level=settings.sandbox,
                home_of=services.organisations.home_of,
            ),
        }
        async with open_runtime(hosting, backend, settings, given=given) as runtime:
            collecting_mirrors = collect_mirrors(
                repositories.collect, backend.database, backend.clock
            )
            await _serve(services, backend, hosting, runtime, collecting_mirrors)
    return 0


async def _serve(
    services: Services,
    backend: Backend,
    hosting: Hosting,
    runtime: Runtime,
    *others: Coroutine[Any, Any, None],
) -> None:
    """Run everything, with `others`, until a signal, or until one part ends."""
    settings = services.settings
    projector = Projector(backend.log, services.readmodel, wakeups=backend.notifier)
    await services.archives.tidy()
    app = create_app(services, pages=dashboard.ROUTES, dialects=dialects_of(settings))
    server = _server(app, settings, services.throttle)
    await server.listen()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    async with hold_lease(hosting, backend, runtime):
        jobs = [server.serve(), projector.run(), runtime.run(), *others]
        jobs.append(collecting(backend.database, backend.blobs, backend.clock))
        jobs.append(
            record_access(
                services.audit, services.recent_api_keys, services.api_keys, backend.clock
            )
        )
        jobs.append(services.dataset_uploads.run())
        jobs.append(watch_stalled_effects(services.readmodel.stalled, backend.clock))
        if settings.retention_days is not None:
            days = settings.retention_days
            jobs.append(archive_periodically(services.retention, backend.clock, days=days))
        jobs.append(
            remove_records_periodically(
                services.retention,
                backend.clock,
                evaluation_days=settings.evaluation_days,
                record_days=settings.record_days,
            )
        )
        if settings.poll_s:
            jobs.append(poll_alone(services.poller, backend.database.url))
        jobs.append(_take_back_left_secrets(services))
        alerts = Alerts(
            backend.database,
            backend.log,
            services.readmodel,
            settings.alerts,
            targets=services.alert_targets,
            target_addresses=settings.git.addresses,
            public_url=settings.public_url,
        )
        jobs.append(alert_alone(alerts, backend.database.url))
        if settings.kafka is not None:
            jobs.append(backend.relay(settings.kafka, tuple(REGISTRY)).run())
        tasks = [asyncio.create_task(job) for job in jobs]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        runtime.stop()
        await finish_requests(server, tasks[0])
        await end([task for task in rest if not task.done()])
        await services.serving.aclose()
        if services.oidc is not None:
            await services.oidc.aclose()
        for task in done:
            task.result()


async def finish_requests(server: HttpServer, serving: "asyncio.Task[None]") -> None:
    """Let the API answer the requests that it has, which need the database, when another part has
    ended."""
    server.stop()
    await asyncio.wait([serving], timeout=STOPPING_S)


@asynccontextmanager
async def _open_forges(backend: Backend, settings: Settings) -> AsyncIterator[ForgeApis]:
    """The APIs of forges, with the credentials of all connections."""
    connections = ForgeConnections(backend.database, Sealer.of(settings))
    allowed = settings.git.addresses
    async with ForgeApis(
        connections.get_connection, public_url=settings.public_url, allowed=allowed
    ) as forges:
        yield forges


def _services(
    backend: Backend, settings: Settings, forges: ForgeApis, repositories: GitRepositories
) -> Services:
    return Services(
        log=backend.log,
        effects=backend.effects,
        database=backend.database,
        blobs=backend.blobs,
        archives=Archives(
            backend.database,
            backend.blobs,
            backend.notifier,
            scratch=settings.home / "archives",
        ),
        artifacts=backend.artifacts,
        readmodel=ReadModel(backend.database),
        repositories=repositories,
        check_repository=repositories.check,
        forges=forges,
        settings=settings,
        clock=backend.clock,
    )


async def _take_back_left_secrets(services: Services) -> None:
    """Delete secrets whose run was never requested, because the process that took its submission died,
    again and again."""
    while True:
        try:
            await services.secret_store.take_left_back()
        except UNAVAILABLE_ERRORS as error:
            go_on()
            logger.warning("secrets of runs that ended cannot be deleted now: %s", error)
        await services.clock.sleep(LEFT_S)


def dialects_of(settings: Settings) -> tuple[Dialect, ...]:
    """The APIs of other platforms' clients that are not turned off."""
    return (osmosis(settings),) if settings.osmosis_api else ()


def _server(
    app: Starlette, settings: Settings, throttle: FailedAuthThrottle | None = None
) -> HttpServer:
    return HttpServer(app, host=settings.host, port=settings.port, limits=LIMITS, throttle=throttle)


def main() -> int:
    """Run the control process. Returns its exit code: 0 after a stop, 1 when its settings are refused,
    and 75 when the database, or something else that it needs, does not answer."""
    hide_memory()
    try:
        settings = Settings.load(os.environ)
        telemetry.setup(settings, service="control")
        failpoints.arm(settings.failpoint or "", settings.home)
        return asyncio.run(serve(settings))
    except (BadSetting, InvalidConfig) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except TransientError as error:
        sys.stderr.write(f"{error}\n")
        return AWAY
    finally:
        telemetry.close()


if __name__ == "__main__":
    sys.exit(main())
