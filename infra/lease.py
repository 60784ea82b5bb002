"""A worker's lease, renewed from its own thread and connection, so that a busy process keeps it.

Losing the lease means that others may already hold what we hold: `on_lost` must stop this worker.
Outcomes that still arrive are fenced by their claim epochs.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence

from infra import failpoints
from infra.database import connect
from infra.effects import PostgresEffects
from schemas.errors import TransientError
from schemas.ids import WorkerId
from schemas.messages import Lane

LEASE_S = 5.0
BEAT_S = 1.0


class LeaseKeeper:
    """Holds a lease while started. `lost` is set once it could not be renewed in time."""

    def __init__(
        self,
        url: str,
        worker: WorkerId,
        *,
        lanes: Sequence[Lane] = (),
        on_beat: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._url = url
        self._worker = worker
        self._lanes = lanes
        self._on_beat = on_beat
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._registered = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.lost = False

    async def start(self) -> None:
        """Register the worker; returns once it holds its lease. Raises TransientError if it cannot."""
        self._thread.start()
        await asyncio.to_thread(self._registered.wait)
        if self._failed is not None:
            raise TransientError(f"no lease could be had: {self._failed}")

    async def stop(self) -> None:
        """Give the lease up at once."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 10)

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except Exception as error:
            self._failed = error
            self._lose()
        finally:
            self._registered.set()

    def _lose(self) -> None:
        if not self._stop.is_set():
            self.lost = True
            self._on_lost()

    async def _keep(self) -> None:
        async with connect(self._url, size=1) as database:
            effects = PostgresEffects(database)
            await effects.register(
                self._worker,
                host=socket.gethostname(),
                pid=os.getpid(),
                lease_s=LEASE_S,
                lanes=self._lanes,
            )
            self._registered.set()
            while not await asyncio.to_thread(self._stop.wait, BEAT_S):
                failpoints.hit("lease.renew")
                if not await self._renewed(effects):
                    self._lose()
                    return
                self._on_beat()
            await effects.expire(self._worker)

    async def _renewed(self, effects: PostgresEffects) -> bool:
        """Renew, through a database that is away for less than the lease."""
        for _ in range(int(LEASE_S / BEAT_S)):
            try:
                return await effects.renew(self._worker, lease_s=LEASE_S)
            except (TimeoutError, OSError, ConnectionError):
                await asyncio.sleep(BEAT_S)
        return False
