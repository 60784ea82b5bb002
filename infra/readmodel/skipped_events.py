"""The queries of the API about events that the read model lacks: those that the projector skipped
because turning them into rows failed, and those that it has not reached yet."""

from typing import TypedDict

from infra.readmodel.platform import COUNTED
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.ids import ConsumerName

SQL = queries("infra/readmodel/read_model.sql")

SHOWN = 5
"""How many skipped events an answer lists; all are counted."""


class SkippedEventJson(TypedDict):
    """An event that has no rows. `event` is its stream and version."""

    event: str
    type: str
    run: str
    error: str


class ReadModelJson(TypedDict):
    """`cursor`: where in the log the projection is. `behind`: events that are not projected yet.
    `skipped`: events without rows; the oldest of them are in `skipped_events`."""

    cursor: str
    behind: int
    skipped: int
    skipped_events: list[SkippedEventJson]


class SkippedEvents:
    """Queries over the skipped events of one projection."""

    def __init__(self, database: Database, projection: ConsumerName) -> None:
        self._pool = database.durable
        self._projection = projection

    async def by_type(self) -> dict[str, int]:
        """Event type -> skipped events."""
        rows = await self._pool.fetch(SQL["count_skipped_events"], self._projection)
        return {row["event_type"]: row["count"] for row in rows}

    async def summary(self) -> ReadModelJson:
        """How complete the read model is."""
        rows = await self._pool.fetch(SQL["skipped_events"], self._projection, SHOWN)
        cursor = await self._pool.fetchrow(SQL["cursor"], self._projection)
        return ReadModelJson(
            cursor=str(Cursor(cursor["xid"], cursor["position"]) if cursor else Cursor()),
            behind=await self._pool.fetchval(SQL["behind"], COUNTED, self._projection),
            skipped=sum((await self.by_type()).values()),
            skipped_events=[
                SkippedEventJson(
                    event=f"{row['stream']}/{row['version']}",
                    type=row["event_type"],
                    run=row["run"],
                    error=row["error"],
                )
                for row in rows
            ],
        )
