"""A runtime in this process over a real database, with consumers of the test's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.memory import MemoryBlobs
from infra.settings.settings import Settings
from infra.spine.bus.embedded import EmbeddedBus
from infra.spine.ports.clock import SystemClock
from infra.spine.ports.effects import Effects
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import News, Notifier
from infra.spine.postgres.pool import Database
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.runtime import Runtime
from schemas.effects import Lane
from schemas.ids import WorkerId
from tests.kit.ports import AllPorts

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
    ports = AllPorts(
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
        ports=replace(ports, **services).build,
        artifacts=artifacts,
        clock=ports.clock,
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
