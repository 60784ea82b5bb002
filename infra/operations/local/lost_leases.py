"""Finds processes that are alive but hold no lease, and so do no work.

A process that loses its lease normally ends by itself. If it does not, its supervisor kills it after
LEASELESS_S seconds in which every check found no lease. That time starts again whenever a check cannot
tell, because the database is not available, or the machine or the process was stopped.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from infra.spine.postgres.errors import CLIENT_ERRORS

LOOK_S = 10.0
"""How often the leases are checked."""

WITHIN_S = 2.0
"""How long the database may take to answer. It is short because the supervisor has one thread."""

LEASELESS_S = 40.0
"""How long a process may live after it lost its lease. Normally it ends by itself before that."""

STARTING_S = 600.0
"""How long a process may take to get its first lease."""


@dataclass(slots=True)
class _Seen:
    had_one: bool = False
    since: float | None = None
    """The time of the first of the consecutive checks that found no lease. None if the last check found
    one or could not tell."""


class LeaseWatch:
    """Remembers the results of the checks. A supervisor has one."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._looked_at = clock()

    def due_in_s(self) -> float:
        """Seconds until the next check."""
        return max(0.0, self._looked_at + LOOK_S - self._clock())

    def observe(
        self,
        running: Collection[str],
        live: Collection[str] | None,
        *,
        still: Collection[str] = (),
    ) -> Mapping[str, float]:
        """Record one check: the running workers, those of them with a valid lease (None: the database
        did not answer), and those that a signal has stopped (`still`). Returns, for each worker without
        a lease, how many seconds have passed since the first of the consecutive checks that found
        none."""
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

    def is_overdue(self, worker: str, without_s: float) -> bool:
        """Whether a process that has had no lease for `without_s` should be killed."""
        return without_s >= (LEASELESS_S if self._seen[worker].had_one else STARTING_S)

    def is_starting(self, worker: str, without_s: float) -> bool:
        """Whether a process without a lease is still within the time that it has until its first one."""
        return not self._seen[worker].had_one and without_s < STARTING_S


async def live_workers(url: str, workers: Collection[str]) -> frozenset[str] | None:
    """The given workers whose lease is valid; None when the database does not answer within WITHIN_S
    seconds."""
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


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, so that it cannot renew its lease."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
