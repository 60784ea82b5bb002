"""Removes records that are old: evaluations, and what the platform noted about its own work.

The database decides what may go (`remove_records` in `schema.sql`), because processes have no right to
delete an event. It removes one evaluation, verification or push to a hub with all of its events in one
transaction, and other records some at a time.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from infra.maintenance.archive import call_removal, unlimited_session
from infra.postgres.pool import Database
from infra.postgres.queries import queries

EVALUATIONS = "evaluations"
OTHERS = ("verifications", "hub_pushes", "deliveries", "statuses", "deployments")
"""The kinds of records that nobody reads for long."""

EVENTS_AT_ONCE = 1000
NEVER = datetime.max.replace(tzinfo=UTC)

SQL = queries("event_log")


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
        removed = dict.fromkeys(kinds, 0)
        async with unlimited_session(self._database.url) as connection:
            for kind in kinds:
                while row := await call_removal(
                    connection, "remove_records", kind, before, None, EVENTS_AT_ONCE
                ):
                    if not row["removed"]:
                        break
                    removed[kind] += row["removed"]
        return removed

    async def remove_evaluation(self, evaluation: str) -> bool:
        """Remove an evaluation with its samples. Returns False when it has not ended, belongs to a run,
        or was removed already."""
        async with unlimited_session(self._database.url) as connection:
            row = await call_removal(
                connection, "remove_records", EVALUATIONS, NEVER, evaluation, EVENTS_AT_ONCE
            )
        return bool(row["removed"])
