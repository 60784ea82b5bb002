"""`python -m infra.spine.postgres.lease_renewer`: the process beside a worker that renews its lease too.

It only renews: it never registers a worker, never revives a lease that has expired, and reports nothing.
A worker that is stopped or dead is not renewed
(docs/decisions/0036-renew-leases-from-a-second-process.md). There is one for each worker, so it
imports nothing but what a statement needs.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

from infra.spine.postgres.errors import DatabaseUnavailable, translating_errors
from infra.spine.postgres.pool import open_session

NOT_RUNNING = "TtZXx"
"""The states of a process (proc(5)) that is stopped, traced or dead."""

RENEW = (
    "update workers set expires_at = clock_timestamp() + make_interval(secs => $2)"
    " where id = $1 and expires_at > clock_timestamp()"
)


class Renewer:
    """The loop of that process."""

    def __init__(
        self,
        url: str,
        worker: str,
        *,
        pid: int,
        lease_s: float,
        beat_s: float,
        patience_s: float,
    ) -> None:
        self._url = url
        self._worker = worker
        self._pid = pid
        self._lease_s = lease_s
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._heard_at = time.monotonic()

    async def run(self) -> None:
        """Renew until the worker is gone. While the database is unavailable, try again."""
        asyncio.get_running_loop().add_reader(0, self._hear)
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                await self._renew_in_session()
            await asyncio.sleep(self._beat_s)

    def _hear(self) -> None:
        if not os.read(0, 65536):
            os._exit(0)  # the worker has ended
        self._heard_at = time.monotonic()

    async def _renew_in_session(self) -> None:
        session = await open_session(self._url, "headrace lease")
        try:
            with translating_errors():
                await session.execute("set synchronous_commit = off")
                while True:
                    if self._is_at_work():
                        await session.execute(
                            RENEW, self._worker, self._lease_s, timeout=self._lease_s
                        )
                    await asyncio.sleep(self._beat_s)
        finally:
            session.terminate()

    def _is_at_work(self) -> bool:
        """Whether the worker may keep its lease. Ends this process when the worker has ended."""
        if os.getppid() != self._pid:
            os._exit(0)
        silent_s = time.monotonic() - self._heard_at
        return is_running(self._pid) and silent_s < self._patience_s


def is_running(pid: int) -> bool:
    """Whether a process is neither stopped nor dead. True where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc/self/stat").exists()
    return stat.rpartition(")")[2].split()[0] not in NOT_RUNNING


def main() -> None:
    """Read the settings from the first line of standard input, and renew."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its worker
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"\n", b""):
        line += byte
    if line:
        settings = json.loads(line)
        asyncio.run(Renewer(settings.pop("url"), settings.pop("worker"), **settings).run())


if __name__ == "__main__":
    main()
