"""The newest events of a run up to a position of the log. Its state there follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.ports.event_log import Cursor
from infra.postgres.pool import Database
from infra.postgres.queries import queries
from schemas.ids import StreamName, checkpoint_stream, policy_stream, run_stream

SQL = queries("moments")


@dataclass(frozen=True, slots=True)
class NewestEvent:
    """The newest event of a type in a stream, and how many of them there were."""

    stream: StreamName
    version: int
    type: str
    count: int


class Moments:
    """Queries over the log at a cursor. They read whole streams of a run, but the data of no event."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def newest(self, run: str, at: Cursor) -> list[NewestEvent]:
        """The newest event of each type in the streams of a run (its own, that of its policy and that of
        its checkpoints) up to a cursor."""
        streams = [run_stream(run), policy_stream(run), checkpoint_stream(run)]
        rows = await self._pool.fetch(SQL["newest_of_types"], streams, str(at.xid), at.position)
        return [
            NewestEvent(StreamName(row["stream"]), row["version"], row["type"], row["count"])
            for row in rows
        ]

    async def place(self, run: str, at: Cursor) -> tuple[StreamName, int] | None:
        """The stream and version of the run's event at a cursor; None when there is none."""
        row = await self._pool.fetchrow(SQL["event_at"], run, str(at.xid), at.position)
        return (StreamName(row["stream"]), row["version"]) if row else None

    async def before(self, run: str, at: Cursor) -> Cursor | None:
        """The cursor of the run's event before this one; None for the first."""
        row = await self._pool.fetchrow(SQL["event_before"], run, str(at.xid), at.position)
        return Cursor(row["xid"], row["position"]) if row else None


def places(found: Sequence[NewestEvent]) -> list[tuple[StreamName, int]]:
    """Where these events are in the log."""
    return [(one.stream, one.version) for one in found]
