"""The adapters a process works with, opened together and closed together: log, effects, bus, blobs.

Which adapter stands behind each port follows from the settings alone, so the same code runs on a
laptop and on a cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from infra.artifacts import ArtifactStore
from infra.blobs import open_blobs
from infra.bus import EmbeddedBus
from infra.clock import SystemClock
from infra.database import open_pool
from infra.datasets import DatasetCache
from infra.effects import PostgresEffects
from infra.log import PostgresLog
from infra.notify import Notifier
from infra.ports import Blobs, Clock
from infra.readmodel import announce_door
from infra.settings import Settings
from schemas.errors import InvalidConfig
from schemas.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything a process needs of the world that is not an engine."""

    url: str
    pool: asyncpg.Pool
    log: PostgresLog
    effects: PostgresEffects
    notifier: Notifier
    blobs: Blobs
    artifacts: ArtifactStore
    datasets: DatasetCache
    clock: Clock

    def bus(self) -> EmbeddedBus:
        """A bus of this process's own (one per runtime)."""
        return EmbeddedBus(self.log, self.notifier)

    async def announce_door(self, worker: WorkerId, url: str, key: str) -> None:
        """Tell the API how to reach this worker's engine."""
        await announce_door(self.pool, worker, url, key)


@asynccontextmanager
async def open_backend(settings: Settings) -> AsyncIterator[Backend]:
    """Connect. Raises InvalidConfig when no database is named: `headrace up` names one."""
    if settings.database_url is None:
        raise InvalidConfig(
            "HEADRACE_DATABASE_URL is not set; start everything with `headrace up`, or name a "
            "Postgres server there"
        )
    async with (
        open_pool(settings.database_url) as pool,
        Notifier(settings.database_url) as notifier,
    ):
        log = PostgresLog(pool, notifier)
        blobs = open_blobs(settings)
        artifacts = ArtifactStore(log, blobs)
        yield Backend(
            url=settings.database_url,
            pool=pool,
            log=log,
            effects=PostgresEffects(pool),
            notifier=notifier,
            blobs=blobs,
            artifacts=artifacts,
            datasets=DatasetCache(artifacts),
            clock=SystemClock(),
        )
