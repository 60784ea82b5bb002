"""The adapters a process works with, opened together and closed together: log, effects, bus, blobs.

Which adapter stands behind each port follows from the settings alone, so the same code runs on a
laptop and on a cluster."""

import importlib.util
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.installation import belong
from infra.blobs.installed import InstalledBlobs, install
from infra.blobs.local import LocalBlobs
from infra.bus.embedded import EmbeddedBus, Reconciled
from infra.bus.kafka.probe import probe
from infra.bus.reconciler import Reconciler
from infra.ports.bus import Bus
from infra.ports.clock import Clock, SystemClock
from infra.ports.services import Blobs
from infra.postgres.effects import PostgresEffects
from infra.postgres.event_log import PostgresLog
from infra.postgres.migrate import check
from infra.postgres.notify import Notifier
from infra.postgres.pool import Database, connect
from infra.settings.kafka import KafkaSettings
from infra.settings.settings import Settings
from schemas.errors import InvalidConfig, TransientError

if TYPE_CHECKING:
    from infra.bus.relay import Relay


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything a process needs of the world that is not an engine."""

    database: Database
    log: PostgresLog
    effects: PostgresEffects
    notifier: Notifier
    blobs: InstalledBlobs
    artifacts: ArtifactStore
    datasets: DatasetCache
    clock: Clock
    kafka: KafkaSettings | None

    def bus(self) -> Bus:
        """A bus of a runtime's own: Kafka with the reconciler behind it, or the log itself."""
        if self.kafka is None:
            return EmbeddedBus(self.log, self.notifier)
        from infra.bus.kafka.bus import KafkaBus
        from infra.postgres.skipped_records import Skips

        broker = KafkaBus(self.kafka, self.log, Skips(self.database))
        return Reconciled(broker, Reconciler(self.log, self.notifier.subscribe()))

    def relay(self, kafka: KafkaSettings, consumers: Sequence[str]) -> "Relay":
        """The relay from the log to Kafka, for these consumers."""
        from infra.bus.kafka.publisher import publishing
        from infra.bus.relay import Relay

        return Relay(
            self.database.url,
            self.log,
            self.notifier.subscribe(),
            connect=partial(publishing, kafka),
            consumers=consumers,
        )


@asynccontextmanager
async def open_backend(settings: Settings) -> AsyncIterator[Backend]:
    """Connect. Raises InvalidConfig when no database is named (`headrace up` names one) or its schema is
    not ours, Conflict when it belongs to another installation."""
    if settings.database_url is None:
        raise InvalidConfig(
            "HEADRACE_DATABASE_URL is not set; start everything with `headrace up`, or name a "
            "Postgres server there"
        )
    if settings.kafka is not None:
        await _reachable(settings.kafka)
    async with (
        connect(settings.database_url, limits=settings.database) as database,
        Notifier(database) as notifier,
        open_blobs(settings) as store,
    ):
        await check(database)
        log = PostgresLog(database, notifier)
        await belong(database, store, settings)
        blobs = await install(store, database)
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
            kafka=settings.kafka,
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
    from infra.blobs.s3.store import open_s3

    async with open_s3(settings.blobs, endpoint=settings.s3_endpoint) as blobs:
        yield blobs


async def check_blobs(settings: Settings) -> None:
    """Raises what `open_blobs` raises: for whoever is about to start processes that will need them."""
    async with open_blobs(settings):
        pass


async def _reachable(kafka: KafkaSettings) -> None:
    """A broker that is away comes back; one that is none, or without a client here, never does.
    Raises InvalidConfig."""
    if importlib.util.find_spec("aiokafka") is None:
        raise InvalidConfig(
            f"HEADRACE_KAFKA holds {kafka.named!r}, but the client of Kafka is not installed: "
            "pip install 'headrace[kafka]'"
        )
    try:
        await probe(kafka)
    except TransientError as error:
        logger.warning("%s; events come from the log until it does", error)
