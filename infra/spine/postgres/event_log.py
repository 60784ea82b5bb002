"""The event log on Postgres: the truth of every run.

Reads run in autocommit and take no transaction id; `commit` is one call of one SQL function. The tail
is ordered by (xid, position) and stops below the horizon: a plain `position > last` tail loses events
of transactions that commit late (tests/contracts/test_postgres.py shows it).
"""

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import asyncpg

from infra.spine.ports.appender import APPENDER
from infra.spine.ports.event_log import (
    Commit,
    CommitMiss,
    CommitRefused,
    Cursor,
    EdgeAppend,
    EdgeAppended,
    NewEvent,
    Recorded,
    Snapshot,
)
from infra.spine.postgres.codec import arguments_of, edge_ids, known_in, recorded_in, written_as
from infra.spine.postgres.errors import is_data_error
from infra.spine.postgres.group_append import append_group
from infra.spine.postgres.horizon import Horizon
from infra.spine.postgres.notify import News, Notifier
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.envelope import EVENT_TYPES, current_type, stored_types
from schemas.errors import Refused
from schemas.events.event import Event
from schemas.ids import ConsumerName, EventId, StreamName

SQL = queries("infra/spine/postgres/sql/event_log.sql")

MISSES = {"HR001": "stale", "HR002": "fenced", "HR004": "duplicate"}
"""The error conditions of `commit_decision`, each as the kind of a CommitMiss."""


MILESTONES = ("rl.run.", "rl.evaluation.")
"""Types of events that say how a run went. They are few, and an index holds only them
(`events_milestones` in `sql/schema.sql`), so that a long run is not read to find one of them."""


def kind_of_types(types: Iterable[str]) -> str:
    """The part of a query that selects events of these types: by the index of milestones if it holds all
    of them."""
    return "of_milestones" if all(kind.startswith(MILESTONES) for kind in types) else "of_types"


def _miss_in(error: asyncpg.PostgresError) -> CommitMiss | CommitRefused | None:
    """Return the exception for an error of `commit_decision`; None when the decision did not cause
    it."""
    state, message = str(error.sqlstate), str(error.args[0])
    if state in MISSES:
        return CommitMiss(MISSES[state], message)
    if state in ("40P01", "40001"):
        return CommitMiss("stale", "a lock")
    if state == "23505" and error.table_name == "inbox":
        return CommitMiss("duplicate", str(error.detail))
    if is_data_error(error):
        return CommitRefused(f"the database cannot hold it: {message} (SQLSTATE {state})")
    return None


class PostgresLog:
    """`infra.spine.ports.event_log.EventLog` on Postgres."""

    def __init__(self, database: Database, notifier: Notifier) -> None:
        self._pool = database.durable
        self._lazy = database.lazy
        self._notifier = notifier
        self._horizon = Horizon()

    @property
    def history_epoch(self) -> int:
        return self._pool.history.history_epoch

    async def load(
        self, streams: Mapping[StreamName, int], *, limit: int | None = None
    ) -> Mapping[StreamName, Sequence[Recorded]]:
        rows = await self._pool.fetch(
            SQL["load"],
            list(streams),
            list(streams.values()),
            limit,
        )
        found: dict[StreamName, list[Recorded]] = {stream: [] for stream in streams}
        for row in rows:
            found[row["stream"]].append(recorded_in(row))
        return found

    async def versions(self, streams: Iterable[StreamName]) -> Mapping[StreamName, int]:
        names = sorted(streams)
        rows = await self._pool.fetch(SQL["versions"], names)
        return {**dict.fromkeys(names, 0), **{row["stream"]: row["version"] for row in rows}}

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        try:
            rows = await self._pool.fetch(SQL["commit"], *arguments_of(commit))
        except asyncpg.PostgresError as error:
            raise _miss_in(error) or error from error
        except ValueError as error:  # text that cannot be stored, or an argument of the wrong type
            raise CommitRefused(f"the database cannot hold it: {error}") from error
        self._notifier.ping(
            [News.LOG] * bool(commit.events) + [News.WORK] * commit.may_bring_claims
        )
        return [written_as(new, row) for new, row in zip(commit.events, rows, strict=True)]

    async def append(
        self,
        events: Sequence[Event],
        *,
        cause: UUID,
        traceparent: str | None = None,
    ) -> Sequence[Recorded]:
        ids = edge_ids(events, cause)
        while True:
            streams = sorted({event.stream for event in events})
            expected, appended = await self.before_append(streams, ids)
            if appended:
                return list(appended.values())
            versions = dict(expected)
            new = []
            for event_id, event in zip(ids, events, strict=True):
                versions[event.stream] += 1
                new.append(
                    NewEvent(
                        id=event_id,
                        stream=event.stream,
                        version=versions[event.stream],
                        event=event,
                        causation=cause,
                        correlation=cause,
                        traceparent=traceparent,
                        actor=APPENDER.get(),
                    )
                )
            try:
                return await self.commit(Commit(expected=expected, events=tuple(new)))
            except CommitMiss:
                await asyncio.sleep(random.uniform(0, 0.01))  # noqa: S311 - jitter

    async def append_all(self, batch: Sequence[EdgeAppend]) -> Sequence[EdgeAppended | Refused]:
        return await append_group(self, batch)

    async def before_append(
        self, streams: Sequence[StreamName], ids: Sequence[EventId]
    ) -> tuple[Mapping[StreamName, int], Mapping[EventId, Recorded]]:
        """As `AppendStore.before_append`. The versions are read in the first query, so the second one
        may find events that are newer. Raises CommitRefused."""
        try:
            rows = await self._pool.fetch(SQL["before_append"], list(ids), streams)
        except (asyncpg.DataError, ValueError) as error:  # a stream's name that is not text
            raise CommitRefused(f"the database cannot hold it: {error}") from error
        versions = {StreamName(row["stream"]): row["version"] for row in rows}
        if not any(row["appended"] for row in rows):
            return versions, {}
        found = await self._pool.fetch(SQL["appended"], list(ids))
        return versions, {recorded.id: recorded for recorded in map(recorded_in, found)}

    async def tail(
        self,
        after: Cursor,
        *,
        limit: int,
        types: Sequence[str] | None = None,
        upto: Cursor | None = None,
    ) -> tuple[Sequence[Recorded], Cursor]:
        end = self._horizon.below if upto is None else "upto_cursor"
        rows = await self._pool.fetch(
            SQL.variant("tail", end=end),
            after.xid,
            after.position,
            limit,
            *((upto.xid, upto.position) if upto is not None else ()),
        )
        if not rows:
            return [], after
        wanted = [row for row in rows if types is None or current_type(row["type"]) in types]
        last = rows[-1]
        return [recorded_in(row) for row in wanted], Cursor(last["xid"], last["position"])

    async def has_events_after(self, after: Cursor) -> bool:
        found = await self._pool.fetchval(
            SQL["position_after"],
            after.xid,
            after.position,
        )
        self._horizon.note(after, hidden=found is not None)
        return found is not None

    async def visible_head(self) -> Cursor:
        row = await self._pool.fetchrow(SQL["visible_head"])
        return Cursor(row["xid"], row["position"]) if row else Cursor()

    async def reaches(self, cursor: Cursor) -> bool:
        found = await self._pool.fetchval(
            SQL["position_from"],
            cursor.xid,
            cursor.position,
        )
        return found is not None or cursor == Cursor()

    async def clock_time(self) -> datetime:
        told: datetime = await self._pool.fetchval(SQL["clock_time"])
        return told

    async def events_at(self, places: Sequence[tuple[StreamName, int]]) -> Sequence[Recorded]:
        rows = await self._pool.fetch(
            SQL["events_at"],
            [stream for stream, _ in places],
            [version for _, version in places],
        )
        return [recorded_in(row) for row in rows]

    async def unconsumed_at(
        self, places: Mapping[tuple[StreamName, int], Collection[ConsumerName]]
    ) -> Sequence[tuple[Recorded, frozenset[ConsumerName]]]:
        rows = await self._pool.fetch(
            SQL["unconsumed_at"],
            [stream for stream, _ in places],
            [version for _, version in places],
            [" ".join(names) for names in places.values()],
        )
        return [
            (recorded_in(r), frozenset(r["awaiting"])) for r in rows if r["type"] in EVENT_TYPES
        ]

    async def read(
        self, run: str, *, after: Cursor, limit: int, types: Sequence[str] | None = None
    ) -> Sequence[Recorded]:
        wanted = list(EVENT_TYPES) if types is None else stored_types(types)
        rows = await self._pool.fetch(
            SQL.variant("read_run", end=self._horizon.below, kind=kind_of_types(wanted)),
            run,
            after.xid,
            after.position,
            limit,
            wanted,
        )
        return known_in(rows)

    async def filter_consumed(
        self, keys: Sequence[tuple[ConsumerName, EventId]]
    ) -> frozenset[tuple[ConsumerName, EventId]]:
        rows = await self._pool.fetch(
            SQL["consumed"],
            [name for name, _ in keys],
            [event_id for _, event_id in keys],
        )
        return frozenset((row["consumer"], row["event_id"]) for row in rows)

    async def unconsumed(
        self, messages: Sequence[tuple[ConsumerName, Recorded]]
    ) -> Sequence[tuple[ConsumerName, Recorded]]:
        if not messages:
            return []
        rows = await self._pool.fetch(
            SQL["unconsumed"],
            [name for name, _ in messages],
            [recorded.id for _, recorded in messages],
            [recorded.cursor.xid for _, recorded in messages],
            [recorded.cursor.position for _, recorded in messages],
        )
        return [messages[row["n"] - 1] for row in rows]

    async def watermark(self, consumer: ConsumerName) -> Cursor:
        row = await self._pool.fetchrow(SQL["watermark"], consumer)
        return Cursor(row["xid"], row["position"]) if row else Cursor()

    async def advance(self, consumers: Sequence[ConsumerName], cursor: Cursor) -> None:
        names = sorted(consumers)  # all transactions lock in this order, so none deadlocks
        await self._lazy.execute(SQL["advance"], names, cursor.xid, cursor.position)

    async def snapshot(
        self, stream: StreamName, fold_version: int, *, upto: int | None = None
    ) -> Snapshot | None:
        row = await self._pool.fetchrow(SQL["snapshot"], stream, fold_version, upto)
        return Snapshot(row["version"], row["state"]) if row else None

    async def save_snapshot(
        self,
        stream: StreamName,
        fold_version: int,
        snapshot: Snapshot,
        *,
        keep_every: int | None = None,
    ) -> None:
        await self._lazy.execute(
            SQL["save_snapshot"],
            stream,
            fold_version,
            snapshot.version,
            snapshot.state,
            keep_every,
        )

    async def artifact(self, sha256: str) -> bytes | None:
        data: bytes | None = await self._pool.fetchval(SQL["artifact"], sha256)
        return data
