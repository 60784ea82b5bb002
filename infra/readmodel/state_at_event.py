"""The events of a run that its state at a position of the log follows from."""

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.event_log import kind_of_types
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.envelope import stored_types
from schemas.events import EVENT_TYPES
from schemas.ids import StreamName, policy_stream, run_stream

SQL = queries("infra/readmodel/state_at_event.sql")

Place = tuple[StreamName, int]
"""A stream and a version."""


@dataclass(frozen=True, slots=True)
class SettledStep:
    """A step that was settled: the versions of the run's stream and of its policy's stream then."""

    step: int
    position: int
    policy_position: int


class StateAtEvent:
    """Queries over the log at a cursor. They read few events, however long the run is, and the data of
    none. An event whose type this version does not know is left out."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def milestones(
        self, run: str, at: Cursor, *, newest: Collection[str], every: Collection[str]
    ) -> list[Place]:
        """The places of a run's milestones (`infra/spine/postgres/event_log.py`) up to a cursor: of some
        types the newest one, and of others every one."""
        wanted = [*newest, *every]
        rows = await self._pool.fetch(
            SQL["milestones"], run, str(at.xid), at.position, wanted, list(every)
        )
        return [
            (StreamName(row["stream"]), version)
            for row in rows
            for version in row["every"] or [row["version"]]
        ]

    async def newest_of_steps(self, run: str, at: Cursor, types: Collection[str]) -> list[Place]:
        """The places of the newest event of each of these types up to a cursor. Each step should have
        one, because the log is read back to it."""
        rows = await self._pool.fetch(
            SQL["newest_of_steps"], run, str(at.xid), at.position, list(types)
        )
        return [(StreamName(row["stream"]), row["version"]) for row in rows]

    async def newest_of_stream(self, stream: StreamName, at: Cursor) -> list[Place]:
        """The place of the newest event of a stream up to a cursor, if there is one."""
        rows = await self._pool.fetch(SQL["newest_of_stream"], stream, str(at.xid), at.position)
        return [(StreamName(row["stream"]), row["version"]) for row in rows]

    async def place(self, run: str, at: Cursor) -> Place | None:
        """The stream and version of the run's event at a cursor; None when there is none."""
        row = await self._pool.fetchrow(
            SQL["event_at"], run, str(at.xid), at.position, list(EVENT_TYPES)
        )
        return (StreamName(row["stream"]), row["version"]) if row else None

    async def before(self, run: str, at: Cursor) -> Cursor | None:
        """The cursor of the run's event before this one; None for the first."""
        return await self.before_page(run, at, limit=0)

    async def before_page(
        self, run: str, end: Cursor, *, limit: int, types: Collection[str] | None = None
    ) -> Cursor | None:
        """The cursor of the event before the last `limit` events before `end`, of some types; None when
        there are not so many."""
        wanted = list(EVENT_TYPES) if types is None else stored_types(types)
        row = await self._pool.fetchrow(
            SQL.variant("before_page", kind=kind_of_types(wanted)),
            run,
            str(end.xid),
            end.position,
            wanted,
            limit,
        )
        return Cursor(row["xid"], row["position"]) if row else None

    async def settled_step(self, run: str, step: int) -> SettledStep | None:
        """Where a step of a run was settled; None when it is not there. An index finds it."""
        row = await self._pool.fetchrow(
            SQL["settled_step"], run_stream(run), policy_stream(run), step
        )
        return SettledStep(**row) if row else None

    async def newest_settled(self, run: str, at: Cursor) -> int | None:
        """The newest step of a run that was settled up to a cursor; None when there is none."""
        step: int | None = await self._pool.fetchval(
            SQL["newest_settled"], run_stream(run), str(at.xid), at.position
        )
        return step

    async def cursor_of(self, run: str, event: UUID) -> Cursor | None:
        """The cursor of the run's event with this id; None when the run has no such event."""
        row = await self._pool.fetchrow(SQL["cursor_of"], run, event)
        return Cursor(row["xid"], row["position"]) if row else None
