"""A runtime on a real database for consumers that need no engine, sandbox or gateway.

A worker process (`consumers/process/worker.py`) belongs to an installation and has everything that its
lanes may need. The runtimes here have only the log, the effects and the bus of the database, and blobs
in a directory."""

from pathlib import Path

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.local import LocalBlobs
from infra.settings.settings import Settings
from infra.spine.bus.embedded import EmbeddedBus
from infra.spine.ports.clock import SystemClock
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import News, Notifier
from infra.spine.postgres.pool import Database
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.runtime import Runtime
from tests.kit.ports import AllPorts


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
    ports = AllPorts(
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
        ports=ports.build,
        artifacts=artifacts,
        clock=ports.clock,
        wakeup=notifier.subscribe(News.WORK),
    )
