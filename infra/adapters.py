"""The adapters of a process, opened and closed together: log, effects, bus, blobs.

The settings alone decide which adapter implements each port, so the same code runs on a laptop and on a
cluster."""

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
from infra.ports.direct_blobs import DirectBlobs
from infra.ports.services import Blobs
from infra.settings.kafka import KafkaSettings
from infra.settings.settings import Settings
from infra.spine.bus.embedded import EmbeddedBus, Reconciled
from infra.spine.bus.reconciler import Reconciler
from infra.spine.ports.bus import Bus
from infra.spine.ports.clock import Clock, SystemClock
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.migrate import check
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, connect
from schemas.errors import InvalidConfig, TransientError

if TYPE_CHECKING:
    from infra.spine.bus.relay import Relay


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """All adapters of a process except its engines."""

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
        """Return a new bus for one runtime: Kafka backed by the reconciler, or the log itself."""
        if self.kafka is None:
            return EmbeddedBus(self.log, self.notifier)
        from infra.spine.bus.kafka.bus import KafkaBus
        from infra.spine.postgres.skipped_records import Skips

        broker = KafkaBus(self.kafka, self.log, Skips(self.database))
        return Reconciled(broker, Reconciler(self.log, self.notifier.subscribe()))

    def relay(self, kafka: KafkaSettings, consumers: Sequence[str]) -> "Relay":
        """Return the relay from the log to Kafka. `consumers` are those that read from the broker."""
        from infra.spine.bus.kafka.publisher import open_publisher
        from infra.spine.bus.relay import Relay

        return Relay(
            self.database.url,
            self.log,
            self.notifier.subscribe(),
            connect=partial(open_publisher, kafka),
            consumers=consumers,
        )


@asynccontextmanager
async def open_backend(settings: Settings) -> AsyncIterator[Backend]:
    """Open all adapters, and close them after the block. Raises InvalidConfig when no database is set
    (`headrace up` sets one) or its schema is not ours, and Conflict when it belongs to another
    installation."""
    if settings.database_url is None:
        raise InvalidConfig(
            "HEADRACE_DATABASE_URL is not set; start everything with `headrace up`, or set it to the "
            "URL of a Postgres server"
        )
    if settings.kafka is not None:
        await _probe_kafka(settings.kafka)
    async with (
        connect(settings.database_url, limits=settings.database) as database,
        Notifier(database) as notifier,
        open_blobs(settings) as store,
    ):
        await check(database)
        log = PostgresLog(database, notifier)
        await belong(database, store, settings)
        direct: DirectBlobs | None = getattr(store, "direct", None)  # an S3 store's
        blobs = await install(store, database, direct=direct)
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
    """Open the blob store of the settings. An S3 store is probed first. Raises InvalidConfig or
    TransientError when the probe fails."""
    if settings.blobs.startswith("file:"):
        yield LocalBlobs(Path(unquote(urlsplit(settings.blobs).path)))
        return
    if importlib.util.find_spec("boto3") is None:
        raise InvalidConfig(
            f"HEADRACE_BLOBS is {settings.blobs}, but the S3 client is not installed: "
            "pip install 'headrace[s3]'"
        )
    from infra.blobs.s3.store import open_s3

    async with open_s3(
        settings.blobs,
        endpoint=settings.s3_endpoint,
        public_endpoint=settings.s3_public_endpoint,
    ) as blobs:
        yield blobs


async def check_blobs(settings: Settings) -> None:
    """Raise what `open_blobs` raises, before processes are started that need the blobs."""
    async with open_blobs(settings):
        pass


async def _probe_kafka(kafka: KafkaSettings) -> None:
    """Log a warning if no broker answers, because one may come back. Raises InvalidConfig when waiting
    does not help: no client is installed, or the server that answers is not Kafka."""
    if importlib.util.find_spec("aiokafka") is None:
        raise InvalidConfig(
            f"HEADRACE_KAFKA holds {kafka.address!r}, but the Kafka client is not installed: "
            "pip install 'headrace[kafka]'"
        )
    from infra.spine.bus.kafka.probe import probe

    try:
        await probe(kafka)
    except TransientError as error:
        logger.warning("%s; events come from the log until one does", error)
