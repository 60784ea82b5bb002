"""The control process: API, sync and the read model's projector in one event loop. Never torch.

This is a composition root: the one place under producers/ that may import consumers.
"""

import asyncio
import logging
import os
import signal
import sys
from urllib.parse import urlsplit

import uvicorn

from consumers.__main__ import lanes_of, load
from consumers.project import Projector
from consumers.worker import hosted, leased, worker_id
from infra import failpoints, telemetry
from infra.backend import open_backend
from infra.git import GitRepositories
from infra.runtime import Hosting
from infra.settings import Settings
from producers.api.app import create_app
from producers.api.services import Services

logger = logging.getLogger(__name__)


async def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns an exit code."""
    consumers = (load("sync"),)
    hosting = Hosting(worker=worker_id(), consumers=consumers, lanes=lanes_of(consumers))
    async with open_backend(settings) as backend, hosted(hosting, backend, settings) as runtime:
        projector = Projector(backend.log, backend.readmodel, wakeups=backend.wakeups)
        app = create_app(
            Services(
                log=backend.log,
                effects=backend.effects,
                blobs=backend.blobs,
                artifacts=backend.artifacts,
                readmodel=backend.readmodel,
                repositories=GitRepositories(settings.home / "git"),
                settings=settings,
                clock=backend.clock,
            )
        )
        server = _server(app, settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
        async with leased(hosting, backend, runtime):
            tasks = [
                asyncio.ensure_future(job)
                for job in (server.serve(), projector.run(), runtime.run())
            ]
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            runtime.stop()
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for task in done:
                task.result()
    return 0


def _server(app: object, settings: Settings) -> uvicorn.Server:
    address = urlsplit(settings.url)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type] - uvicorn's own ASGI type is narrower than Starlette
        host=address.hostname or "127.0.0.1",
        port=address.port or 8420,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined] - ours stop all jobs
    return server


def main() -> int:
    settings = Settings.load(os.environ)
    telemetry.setup(settings, service="control")
    failpoints.arm(settings.failpoint or "", settings.home)
    return asyncio.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
