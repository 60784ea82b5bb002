"""A runtime on a real database for consumers that need no engine, sandbox or gateway.

A worker process (`consumers/process/worker.py`) belongs to an installation and has everything that its
lanes may need. The runtimes here have only the log, the effects and the bus of the database, and blobs
in a directory."""

from pathlib import Path

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.local import LocalBlobs
from infra.bus.embedded import EmbeddedBus
from infra.ports.clock import SystemClock
from infra.ports.ports import Ports
from infra.postgres.effects import PostgresEffects
from infra.postgres.event_log import PostgresLog
from infra.postgres.notify import News, Notifier
from infra.postgres.pool import Database
from infra.runtime.hosting import Hosting
from infra.runtime.runtime import Runtime
from infra.settings.settings import Settings


def runtime_on(
    database: Database,
    notifier: Notifier,
    hosting: Hosting,
    *,
    home: Path,
    log: PostgresLog | None = None,
    settings: Settings | None = None,
) -> Runtime:
    """A runtime over `database`. `log` replaces the log, for example to observe commits. `settings`
    default to those of `home`."""
    log = log or PostgresLog(database, notifier)
    blobs = LocalBlobs(home / "blobs")
    artifacts = ArtifactStore(log, blobs)
    ports = Ports(
        log=log,
        blobs=blobs,
        artifacts=artifacts,
        datasets=DatasetCache(artifacts),
        clock=SystemClock(),
        settings=settings or Settings.load({"HEADRACE_HOME": str(home)}),
    )
    return Runtime(
        hosting,
        log=log,
        effects=PostgresEffects(database),
        bus=EmbeddedBus(log, notifier),
        ports=ports,
        artifacts=artifacts,
        wakeup=notifier.subscribe(News.WORK),
    )
