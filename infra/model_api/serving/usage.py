"""Counts what each API key used of each model. The counts are written together, once a second, so a
process that is killed loses at most those of its last second."""

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass

from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

logger = logging.getLogger(__name__)

SQL = queries("infra/model_api/serving/serving.sql")
WRITE_S = 1.0


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UsageCounts:
    """Counts of this process that are not written yet."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable
        self._counts: dict[tuple[str, str], _Counts] = defaultdict(_Counts)
        self._has_news = asyncio.Event()

    def add(self, api_key: str, model: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Count one answered request."""
        counts = self._counts[api_key, model]
        counts.requests += 1
        counts.prompt_tokens += prompt_tokens
        counts.completion_tokens += completion_tokens
        self._has_news.set()

    async def run(self) -> None:
        """Write counts until cancelled. Those that could not be written are kept."""
        while True:
            await self._has_news.wait()
            await asyncio.sleep(WRITE_S)
            try:
                await self.write()
            except UNAVAILABLE_ERRORS as error:
                logger.warning("the use of deployments cannot be written now: %s", error)

    async def write(self) -> None:
        """Write all counts. Raises the errors of the database."""
        taken, self._counts = self._counts, defaultdict(_Counts)
        self._has_news.clear()
        if not taken:
            return
        try:
            await self._pool.execute(
                SQL["add_usage"],
                [api_key for api_key, _ in taken],
                [model for _, model in taken],
                [counts.requests for counts in taken.values()],
                [counts.prompt_tokens for counts in taken.values()],
                [counts.completion_tokens for counts in taken.values()],
            )
        except BaseException:
            for key, counts in taken.items():
                kept = self._counts[key]
                kept.requests += counts.requests
                kept.prompt_tokens += counts.prompt_tokens
                kept.completion_tokens += counts.completion_tokens
            self._has_news.set()
            raise
