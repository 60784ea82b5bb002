"""The adapters a process works with, opened together and closed together: log, effects, bus, blobs.

Which adapter stands behind each port follows from the settings alone, so the same code runs on a
laptop and on a cluster."""

import importlib.util
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
    async with (
        connect(settings.database_url, limits=settings.database) as database,
        Notifier(database) as notifier,
        open_blobs(settings) as blobs,
    ):
        await check(database)
        log = PostgresLog(database, notifier)
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


@asynccontextmanager
async def open_blobs(settings: Settings) -> AsyncIterator[Blobs]:
    """The blobs of the settings. Raises InvalidConfig or TransientError when a store does not do what
    it must; it is asked first."""
    if settings.blobs.startswith("file:"):
        yield LocalBlobs(Path(unquote(urlsplit(settings.blobs).path)))
        return
    if importlib.util.find_spec("boto3") is None:
        raise InvalidConfig(
            f"HEADRACE_BLOBS is {settings.blobs}, but the client of S3 is not installed: "
            "pip install 'headrace[s3]'"
        )
    from infra.s3 import open_s3

    async with open_s3(settings.blobs, endpoint=settings.s3_endpoint) as blobs:
        yield blobs


async def check_blobs(settings: Settings) -> None:
    """Raises what `open_blobs` raises: for whoever is about to start processes that will need them."""
    async with open_blobs(settings):
        pass
