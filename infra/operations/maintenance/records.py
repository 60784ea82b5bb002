"""Removes records that are old: evaluations, and what the platform noted about its own work.

The database decides what may go (`may_remove` in `schema.sql`), because processes have no right to
delete an event. It removes one evaluation, verification or upload to a hub with all of its events in one
transaction, and other records some at a time. An index tells where to go on, so that each old event is
looked at once. Processes that remove at the same time skip each other's records.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg

from infra.operations.maintenance.archive import call_removal, unlimited_session
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

EVALUATIONS = "evaluations"
ROWS = ("alerts", "uploads", "usage")
"""Records that are rows of the database and not in the log."""

OTHERS = (
    *("verifications", "hub_uploads", "deliveries", "statuses", "deployments", "dead_letters"),
    *("pushes", "ref_checks", "syncs"),
    *ROWS,
)
"""The kinds of records that nobody reads for long."""

AT_ONCE = 1000
"""How many events or rows are looked at, and at most removed, in one transaction."""

BEGINNING = datetime.min.replace(tzinfo=UTC)

SQL = queries("infra/spine/postgres/sql/event_log.sql")


class Records:
    """Counts and removes records. Methods that remove raise TransientError while a consumer has not read
    their events."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def count(self, kinds: Sequence[str], *, before: datetime) -> dict[str, int]:
        """Return how many records of each kind are older than `before` and may be removed."""
        rows = await self._database.lazy.fetch(SQL["count_records"], list(kinds), before)
        return {row["r_kind"]: row["r_count"] for row in rows}

    async def remove(self, kinds: Sequence[str], *, before: datetime) -> dict[str, int]:
        """Remove the records of these kinds that are older than `before`. Returns how many of each."""
        removed: dict[str, int] = {}
        async with unlimited_session(self._database.url) as connection:
            for kind in kinds:
                remove = _remove_rows if kind in ROWS else _remove_events
                removed[kind] = await remove(connection, kind, before)
        return removed

    async def remove_evaluation(self, evaluation: str) -> bool:
        """Remove an evaluation with its samples. Returns False when it has not ended, belongs to a run,
        or was removed already."""
        async with unlimited_session(self._database.url) as connection:
            row = await call_removal(connection, "remove_evaluation", evaluation)
        return bool(row["removed"])


async def _remove_events(connection: Any, kind: str, before: datetime) -> int:
    removed = 0
    for found in await connection.fetch(SQL["record_types"], kind):
        place: tuple[datetime | None, int] = (BEGINNING, 0)
        while place[0] is not None:
            try:
                page = await call_removal(
                    connection, "remove_page", kind, found["type"], before, *place, AT_ONCE
                )
            except asyncpg.DeadlockDetectedError:
                continue  # another process removes what shares a row with it, and goes on now
            removed += page["r_removed"]
            place = page["r_time"], page["r_position"]
    return removed


async def _remove_rows(connection: Any, kind: str, before: datetime) -> int:
    removed = 0
    while count := (await call_removal(connection, "remove_old_rows", kind, before, AT_ONCE))[
        "removed"
    ]:
        removed += count
    return removed
