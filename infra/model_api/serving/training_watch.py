"""Knows whether a run trains, so that serving takes only its share of the machine meanwhile.

The database is asked at most once in LOOK_S seconds, and only while something is being served.
"""

import logging
import time

from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

logger = logging.getLogger(__name__)

SQL = queries("infra/model_api/serving/serving.sql")
LOOK_S = 1.0


class TrainingWatch:
    """The share of the engine's time that serving may take now, from 0 to 1."""

    def __init__(self, database: Database, *, share_percent: int) -> None:
        self._pool = database.durable
        self._limit = share_percent / 100
        self._looked_at = float("-inf")
        self._is_training = True

    def share(self) -> float:
        """The share that was right when it was looked up last."""
        return self._limit if self._is_training else 1.0

    async def look(self) -> None:
        """Ask the database again if the last answer is old. If it does not answer, a run may train."""
        now = time.monotonic()
        if self._limit >= 1 or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            self._is_training = bool(await self._pool.fetchval(SQL["is_training"]))
        except UNAVAILABLE_ERRORS as error:
            self._is_training = True
            logger.warning("whether a run trains cannot be read now: %s", error)
