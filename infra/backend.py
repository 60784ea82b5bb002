"""The adapters a process works with, opened together and closed together: log, effects, bus, blobs.

Which adapter stands behind each port follows from the settings alone, so the same code runs on a
laptop and on a cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.artifacts import ArtifactStore
from infra.blobs import LocalBlobs
from infra.bus import EmbeddedBus
from infra.clock import SystemClock
from infra.database import Database, connect
from infra.datasets import DatasetCache
from infra.effects import PostgresEffects
from infra.installation import belong
from infra.log import PostgresLog
from infra.migrate import check
from infra.notify import Notifier
from infra.ports import Blobs, Clock
from infra.settings import Settings
from schemas.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything a process needs of the world that is not an engine."""

    database: Database
    log: PostgresLog
    effects: PostgresEffects
    notifier: Notifier
    blobs: Blobs
    artifacts: ArtifactStore
    datasets: DatasetCache
    clock: Clock

    def bus(self) -> EmbeddedBus:
        """A bus of a runtime's own."""
        return EmbeddedBus(self.log, self.notifier)


@asynccontextmanager
async def open_backend(settings: Settings) -> AsyncIterator[Backend]:
    """Connect. Raises InvalidConfig when no database is named (`headrace up` names one) or its schema is
    not ours, Conflict when it belongs to another installation."""
    if settings.database_url is None:
        raise InvalidConfig(
            "HEADRACE_DATABASE_URL is not set; start everything with `headrace up`, or name a "
            "Postgres server there"
        )
    limits = settings.database
    async with (
        connect(settings.database_url, limits=limits) as database,
        Notifier(database) as notifier,
    ):
        await check(database)
        log = PostgresLog(database, notifier)
        blobs = LocalBlobs(Path(unquote(urlsplit(settings.blobs).path)))
        await belong(database, blobs, settings)
        artifacts = ArtifactStore(log, blobs)
        yield Backend(
            database=database,
            log=log,
            effects=PostgresEffects(database),
            notifier=notifier,
            blobs=blobs,
            artifacts=artifacts,
            datasets=DatasetCache(artifacts),
            clock=SystemClock(),
        )
