"""A worker's lease, renewed from its own thread and connection, so that a busy process keeps it.

A process beside the worker (`lease_renewer.py`) renews it too, because code in C may keep all threads of
the worker from running (docs/decisions/0036-renew-leases-from-a-second-process.md).

Once the lease is lost, other workers may already hold our claims. `on_lost` must stop this worker, and
`on_overdue` ends the process if the worker has not stopped by then. Outcomes that still arrive are
rejected by their epochs.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from infra import failpoints
from infra.settings.settings import DatabaseLimits
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.postgres.pool import connect
from schemas.effects.effect import Lane
from schemas.errors import TransientError
from schemas.ids import WorkerId

logger = logging.getLogger(__name__)

LEASE_S = 5.0
BEAT_S = 1.0

LEASE_LOST = 3
"""Exit code of a worker whose lease ran out, and whose claims are no longer its own."""

LEAVE_S = 15.0
"""How long a process that has lost its lease may take to end in order."""


HUNG_S = 300.0
"""How long a lease is renewed for a worker whose threads do not run."""


def leave() -> None:
    """End this process now, even if its loops are blocked. The message is written without a lock,
    because a blocked thread may hold the lock."""
    message = f"the lease ran out {LEAVE_S:.0f} s ago and the process is still here: it is ended\n"
    with contextlib.suppress(OSError):
        os.write(2, message.encode())
    os._exit(LEASE_LOST)


class LeaseKeeper:
    """Holds a lease from `start` to `stop`. `lost` is set once the lease has expired although the
    database was available. This happens when the process was stopped for a while, or when somebody
    ended its lease."""

    def __init__(
        self,
        url: str,
        worker: WorkerId,
        *,
        lanes: Sequence[Lane] = (),
        on_beat: Callable[[], None],
        on_lost: Callable[[], None],
        on_overdue: Callable[[], None] | None = None,
    ) -> None:
        """`on_overdue` is called, in a thread, when this process still runs LEAVE_S after its lease was
        lost (usually it is `leave`). It is None when other work shares the process."""
        self._url = url
        self._worker = worker
        self._lanes = lanes
        self._on_beat = on_beat
        self._on_lost = on_lost
        self._on_overdue = on_overdue
        self._stop = threading.Event()
        self._registered = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.lost = False

    async def start(self) -> None:
        """Register the worker. Returns once it holds its lease. Raises TransientError if it cannot."""
        self._thread.start()
        await asyncio.to_thread(self._registered.wait)
        if self._failed is not None:
            raise TransientError(
                f"the worker cannot register its lease ({self._failed}); try again"
            )

    async def stop(self) -> None:
        """Release the lease at once."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 10)

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except Exception as error:  # the thread must say that the lease is lost
            self._failed = error
            self._lose()
        finally:
            self._registered.set()

    def _lose(self) -> None:
        if not self._stop.is_set():
            self.lost = True
            logger.error("the lease of %s ran out; this process ends", self._worker)
            if self._on_overdue is not None:
                overdue = threading.Timer(LEAVE_S, self._on_overdue)
                overdue.daemon = True
                overdue.start()
            self._on_lost()

    async def _keep(self) -> None:
        limits = DatabaseLimits(statement_s=LEASE_S)
        async with connect(self._url, size=1, limits=limits) as database:
            effects = PostgresEffects(database)
            await self._register(effects)
            renewal = LeaseRenewal(self._url, self._worker, lease_s=LEASE_S, beat_s=BEAT_S)
            try:
                renewal.beat()
                self._registered.set()
                while not await asyncio.to_thread(self._stop.wait, BEAT_S):
                    failpoints.hit("lease.renew")
                    if not await self._renew(effects):
                        self._lose()
                        return
                    renewal.beat()
                    self._on_beat()
            finally:
                renewal.stop()
            with contextlib.suppress(DatabaseUnavailable):
                await effects.expire(self._worker)

    async def _register(self, effects: PostgresEffects) -> None:
        await effects.register(
            self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            lease_s=LEASE_S,
            lanes=self._lanes,
        )

    async def _renew(self, effects: PostgresEffects) -> bool:
        """Renew the lease, and wait while the database is unavailable. A lease that expired meanwhile is
        registered again, because epochs decide which claims are still ours. Returns False when the lease
        expired while the database was available."""
        away, history_epoch = False, effects.history.history_epoch
        while not self._stop.is_set():
            try:
                if await effects.renew(self._worker, lease_s=LEASE_S):
                    return True
                if not away and effects.history.history_epoch == history_epoch:
                    return False
                await self._register(effects)
            except DatabaseUnavailable as error:
                if not away:
                    logger.warning("the lease cannot be renewed: %s", error)
                away = True
                await asyncio.sleep(BEAT_S)
        return True


class LeaseRenewal:
    """Starts and stops the process that renews a worker's lease beside it. `beat` does not block."""

    def __init__(self, url: str, worker: WorkerId, *, lease_s: float, beat_s: float) -> None:
        # Without /proc nobody can see that the worker is stopped, so only its threads count.
        patience_s = HUNG_S if Path("/proc/self/stat").exists() else lease_s
        self._settings = {
            "url": url,
            "worker": worker,
            "pid": os.getpid(),
            "lease_s": lease_s,
            "beat_s": beat_s,
            "patience_s": patience_s,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def beat(self) -> None:
        """Say that the worker's threads run. Starts the process if there is none."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        self._write(b"\n")

    def stop(self) -> None:
        """End the process."""
        if (process := self._process) is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.kill()
            process.wait()
        self._process = None

    def _start(self) -> None:
        # The database's address may hold a password, so it is not an argument.
        command = [sys.executable, "-m", "infra.spine.postgres.lease_renewer"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101 - it was started with one
        os.set_blocking(self._process.stdin.fileno(), False)
        self._write(json.dumps(self._settings).encode())

    def _write(self, data: bytes) -> None:
        """Write to the process, if it reads. A dead one is replaced at the next beat."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(data)
