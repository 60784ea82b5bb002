"""Which processes are alive and work for nobody: they hold no lease, and do not end.

A process that lost its lease ends by itself. Where that fails, its supervisor ends it, once the database
has said for some time, at every look, that it has none. Whatever keeps us from knowing (a database that
is away, a machine or a process that was stopped) starts that time again.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from infra.postgres.errors import CLIENT_ERRORS

LOOK_S = 10.0
"""How often the leases are looked at."""

WITHIN_S = 2.0
"""How long the database may take to answer: the supervisor has one thread."""

LEASELESS_S = 40.0
"""How long a process may live without the lease that it once had. It ends by itself before."""

STARTING_S = 600.0
"""How long a process that never had one may take to its first."""


@dataclass(slots=True)
class _Seen:
    had_one: bool = False
    since: float | None = None
    """When the looks without a lease began."""


class LeaseWatch:
    """Remembers the looks. One per supervisor."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._looked_at = clock()

    def due_in_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._looked_at + LOOK_S - self._clock())

    def look(
        self,
        running: Collection[str],
        live: Collection[str] | None,
        *,
        still: Collection[str] = (),
    ) -> Mapping[str, float]:
        """One look: the workers that run, those of them with a live lease (None: the database did not
        say), and those that somebody stopped. Returns how many seconds each of the others has been seen
        without, so far."""
        now = self._clock()
        jumped = now - self._looked_at > 3 * LOOK_S + WITHIN_S
        self._looked_at = now
        self._seen = {worker: self._seen.get(worker, _Seen()) for worker in running}
        for worker, seen in self._seen.items():
            known = live is not None and not jumped and worker not in still
            held = live is not None and worker in live
            seen.had_one |= held
            if held or not known:
                seen.since = None
            elif seen.since is None:
                seen.since = now
        return {w: now - seen.since for w, seen in self._seen.items() if seen.since is not None}

    def overdue(self, worker: str, without_s: float) -> bool:
        """Whether a process that has been without a lease for so long is to be ended."""
        return without_s >= (LEASELESS_S if self._seen[worker].had_one else STARTING_S)


async def live_workers(url: str, workers: Collection[str]) -> frozenset[str] | None:
    """Those of these workers whose lease is live; None when the database does not say so soon."""
    connection = None
    try:
        async with asyncio.timeout(WITHIN_S):
            connection = await asyncpg.connect(
                url, timeout=WITHIN_S, server_settings={"application_name": "headrace supervisor"}
            )
            rows = await connection.fetch(
                "select id from workers where id = any ($1) and expires_at > clock_timestamp()",
                list(workers),
            )
            return frozenset(row["id"] for row in rows)
    except (*CLIENT_ERRORS, asyncpg.PostgresError, ValueError):
        return None
    finally:
        if connection is not None:
            connection.terminate()


def stands_still(pid: int) -> bool:
    """Whether a process was stopped by a signal: who did that goes on with it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
