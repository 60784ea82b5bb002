"""Counts the records on a bus that could not be used, in a table that the API and Prometheus read."""

import logging

from infra.spine.postgres.pool import Database

logger = logging.getLogger(__name__)


class Skips:
    """Counts by reason, in the table `bus_skips`. This process logs the first record of each reason."""

    def __init__(self, database: Database | None) -> None:
        self._database = database
        self.counts: dict[str, int] = {}

    async def add(self, reason: str, example: str, *, count: int = 1) -> None:
        """Add `count` to the reason's counter. `example` names one of the records, for the log."""
        known = self.counts.get(reason, 0)
        self.counts[reason] = known + count
        if not known:
            logger.warning("skipped, as are more like it: %s (%s)", example, reason)
        if self._database is None:
            return
        await self._database.lazy.execute(
            "insert into bus_skips as b (reason, count) values ($1, $2) on conflict (reason)"
            " do update set count = b.count + excluded.count, last_at = clock_timestamp()",
            reason,
            count,
        )
