"""A runtime in this process over a real database, with consumers of the test's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.bus.embedded import EmbeddedBus
from infra.memory.blobs import MemoryBlobs
from infra.ports.clock import SystemClock
from infra.ports.effects import Effects
from infra.ports.ports import Ports
from infra.postgres.effects import PostgresEffects
from infra.postgres.event_log import PostgresLog
from infra.postgres.notify import News, Notifier
from infra.postgres.pool import Database
from infra.runtime.consumer import AnyConsumer
from infra.runtime.hosting import Hosting
from infra.runtime.runtime import Runtime
from infra.settings.settings import Settings
from schemas.effects import Lane
from schemas.ids import WorkerId

WORKER = WorkerId("w")


def runtime_on(
    hosted: AnyConsumer,
    database: Database,
    notifier: Notifier,
    home: Path,
    effects: Effects | None = None,
    **services: Any,
) -> tuple[PostgresLog, Runtime]:
    """A log, and a runtime over it that hosts one consumer. `effects` replaces the Postgres adapter, and
    `services` are further ports."""
    log = PostgresLog(database, notifier)
    artifacts = ArtifactStore(log, MemoryBlobs())
    ports = Ports(
        log=log,
        blobs=MemoryBlobs(),
        artifacts=artifacts,
        datasets=DatasetCache(artifacts),
        clock=SystemClock(),
        settings=Settings.load({"HEADRACE_HOME": str(home)}),
    )
    runtime = Runtime(
        Hosting(WORKER, (hosted,), (Lane.CONTROL,)),
        log=log,
        effects=effects or PostgresEffects(database),
        bus=EmbeddedBus(log, notifier),
        ports=replace(ports, **services),
        artifacts=artifacts,
        wakeup=notifier.subscribe(News.WORK),
    )
    return log, runtime


@asynccontextmanager
async def working(
    hosted: AnyConsumer,
    database: Database,
    home: Path,
    effects: Effects | None = None,
    **services: Any,
) -> AsyncIterator[tuple[PostgresLog, Runtime]]:
    """Run a runtime under a long lease inside the block."""
    async with Notifier(database) as notifier:
        await PostgresEffects(database).register(WORKER, host="h", pid=1, lease_s=600)
        log, started = runtime_on(hosted, database, notifier, home, effects, **services)
        task = asyncio.ensure_future(started.run())
        try:
            yield log, started
        finally:
            started.stop()
            await task
