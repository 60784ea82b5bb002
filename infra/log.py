"""The event log on Postgres: the truth of every run.

Reads run in autocommit and take no transaction id; `commit` is one call of one SQL function. The tail
is ordered by (xid, position) and stops below the horizon: a plain `position > last` tail loses events
of transactions that commit late (tests/contracts/test_postgres.py shows it).
"""

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import PydanticSerializationError

from infra.database import Database
from infra.notify import News, Notifier
from infra.ports import Commit, CommitMiss, Cursor, Encoded, NewEvent, Recorded, Snapshot
from schemas.errors import Refused
from schemas.events import EVENT_TYPES, MAX_EVENT_BYTES, Event
from schemas.ids import ConsumerName, EventId, StreamName, derive_id

COLUMNS = (
    "position, xid, id, stream, version, type, schema_version, data, run_id, causation,"
    " correlation, traceparent, time"
)

BELOW_HORIZON = "xid < pg_snapshot_xmin(pg_current_snapshot())"

KNOWN = "id = any ($1) and causation = correlation"
"""Events of edges, and of nobody else: what an edge appends begins a correlation of its own. An index
holds just these, so that the log itself remembers what was appended, for good and without a copy."""

UNCONSUMED = (
    "not exists (select from inbox i where i.consumer = {name} and i.event_id = {e}.id)"
    " and not exists (select from watermarks m where m.consumer = {name}"
    " and (m.xid, m.position) >= ({e}.xid, {e}.position))"
)
"""Whether a consumer has not consumed an event. One statement, so one snapshot: who no longer sees a
purged inbox row sees the watermark."""

COMMIT = f"select * from commit_decision({', '.join(f'${n}' for n in range(1, 33))})"  # noqa: S608 - constants


class PostgresLog:
    """`infra.ports.EventLog` on Postgres."""

    def __init__(self, database: Database, notifier: Notifier) -> None:
        self._pool = database.durable
        self._lazy = database.lazy
        self._notifier = notifier

    async def load(
        self, streams: Mapping[StreamName, int], *, limit: int | None = None
    ) -> Mapping[StreamName, Sequence[Recorded]]:
        rows = await self._pool.fetch(
            f"select {COLUMNS} from unnest($1::text[], $2::integer[]) as w (name, above)"  # noqa: S608 - constants
            " join events on stream = w.name and version > w.above order by stream, version limit $3",
            list(streams),
            list(streams.values()),
            limit,
        )
        found: dict[StreamName, list[Recorded]] = {stream: [] for stream in streams}
        for row in rows:
            found[row["stream"]].append(_recorded(row))
        return found

    async def versions(self, streams: Iterable[StreamName]) -> Mapping[StreamName, int]:
        names = sorted(streams)
        rows = await self._pool.fetch(
            "select stream, version from streams where stream = any ($1)", names
        )
        return {**dict.fromkeys(names, 0), **{row["stream"]: row["version"] for row in rows}}

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        arguments = _arguments(commit)
        try:
            rows = await self._pool.fetch(COMMIT, *arguments)
        except asyncpg.UniqueViolationError as error:
            raise CommitMiss("duplicate", str(error.detail)) from error
        except asyncpg.PostgresError as error:
            if error.sqlstate == "HR001":
                raise CommitMiss("stale", str(error.args[0])) from error
            if error.sqlstate == "HR002":
                raise CommitMiss("fenced", str(error.args[0])) from error
            if error.sqlstate in ("40P01", "40001"):
                raise CommitMiss("stale", "a lock") from error
            raise
        self._notifier.ping([News.LOG] * bool(commit.events) + [News.WORK] * commit.asks)
        return [_written(new, row) for new, row in zip(commit.events, rows, strict=True)]

    async def append(
        self,
        events: Sequence[Event],
        *,
        cause: UUID,
        traceparent: str | None = None,
    ) -> Sequence[Recorded]:
        ids = edge_ids(events, cause)
        while True:
            # In this order: who finds the streams unmoved in the commit has seen all that is known.
            expected = await self.versions({event.stream for event in events})
            if known := await self._appended(ids):
                return known
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
                    )
                )
            try:
                return await self.commit(Commit(expected=expected, events=tuple(new)))
            except CommitMiss:
                await asyncio.sleep(random.uniform(0, 0.01))  # noqa: S311 - jitter

    async def tail(
        self, after: Cursor, *, limit: int, types: Sequence[str] | None = None
    ) -> tuple[Sequence[Recorded], Cursor]:
        rows = await self._pool.fetch(
            f"select {COLUMNS} from events where (xid, position) > ($1, $2)"  # noqa: S608 - constants
            f" and {BELOW_HORIZON} order by xid, position limit $3",
            after.xid,
            after.position,
            limit,
        )
        if not rows:
            return [], after
        wanted = [row for row in rows if types is None or row["type"] in types]
        last = rows[-1]
        return _known(wanted), Cursor(last["xid"], last["position"])

    async def ahead(self, after: Cursor) -> bool:
        # Without the order the planner walks through the whole log when nothing is ahead.
        found = await self._pool.fetchval(
            "select position from events where (xid, position) > ($1, $2)"
            " order by xid, position limit 1",
            after.xid,
            after.position,
        )
        return found is not None

    async def head(self) -> Cursor:
        row = await self._pool.fetchrow(
            f"select xid, position from events where {BELOW_HORIZON}"  # noqa: S608 - constants
            " order by xid desc, position desc limit 1"
        )
        return Cursor(row["xid"], row["position"]) if row else Cursor()

    async def held(self, places: Sequence[tuple[StreamName, int]]) -> Sequence[Recorded]:
        rows = await self._pool.fetch(
            f"select {COLUMNS} from unnest($1::text[], $2::integer[]) as w (name, at)"  # noqa: S608 - constants
            " join events on stream = w.name and version = w.at",
            [stream for stream, _ in places],
            [version for _, version in places],
        )
        return _known(rows)

    async def awaited(
        self, places: Mapping[tuple[StreamName, int], Collection[ConsumerName]]
    ) -> Sequence[tuple[Recorded, frozenset[ConsumerName]]]:
        rows = await self._pool.fetch(
            f"select {COLUMNS}, array(select n from unnest(string_to_array(w.names, ' ')) n"  # noqa: S608 - constants
            f" where {UNCONSUMED.format(name='n', e='e')}) as awaiting"
            " from unnest($1::text[], $2::integer[], $3::text[]) as w (held, at, names)"
            " join events e on e.stream = w.held and e.version = w.at",
            [stream for stream, _ in places],
            [version for _, version in places],
            [" ".join(names) for names in places.values()],
        )
        return [(_recorded(r), frozenset(r["awaiting"])) for r in rows if r["type"] in EVENT_TYPES]

    async def read(
        self, run: str, *, after: Cursor, limit: int, types: Sequence[str] | None = None
    ) -> Sequence[Recorded]:
        rows = await self._pool.fetch(
            f"select {COLUMNS} from events where run_id = $1 and (xid, position) > ($2, $3)"  # noqa: S608 - constants
            f" and {BELOW_HORIZON} and ($5::text[] is null or type = any ($5))"
            " order by xid, position limit $4",
            run,
            after.xid,
            after.position,
            limit,
            list(types) if types is not None else None,
        )
        return _known(rows)

    async def find(self, event_id: UUID, *, stream: StreamName) -> Recorded | None:
        """One event of a stream by its id."""
        row = await self._pool.fetchrow(
            f"select {COLUMNS} from events where stream = $1 and id = $2",  # noqa: S608 - constants
            stream,
            event_id,
        )
        return _recorded(row) if row else None

    async def consumed(
        self, keys: Sequence[tuple[ConsumerName, EventId]]
    ) -> frozenset[tuple[ConsumerName, EventId]]:
        rows = await self._pool.fetch(
            "select consumer, event_id from inbox"
            " join unnest($1::text[], $2::uuid[]) as w (name, id) on consumer = name and event_id = id",
            [name for name, _ in keys],
            [event_id for _, event_id in keys],
        )
        return frozenset((row["consumer"], row["event_id"]) for row in rows)

    async def due(
        self, messages: Sequence[tuple[ConsumerName, Recorded]]
    ) -> Sequence[tuple[ConsumerName, Recorded]]:
        if not messages:
            return []
        rows = await self._pool.fetch(
            "select n from unnest($1::text[], $2::uuid[], $3::xid8[], $4::bigint[])"  # noqa: S608 - constants
            " with ordinality as w (name, id, xid, position, n)"
            f" where {UNCONSUMED.format(name='w.name', e='w')} order by n",
            [name for name, _ in messages],
            [recorded.id for _, recorded in messages],
            [recorded.cursor.xid for _, recorded in messages],
            [recorded.cursor.position for _, recorded in messages],
        )
        return [messages[row["n"] - 1] for row in rows]

    async def watermark(self, consumer: ConsumerName) -> Cursor:
        row = await self._pool.fetchrow(
            "select xid, position from watermarks where consumer = $1", consumer
        )
        return Cursor(row["xid"], row["position"]) if row else Cursor()

    async def advance(self, consumer: ConsumerName, cursor: Cursor) -> None:
        await self._lazy.execute(
            "insert into watermarks as w (consumer, xid, position) values ($1, $2, $3)"
            " on conflict (consumer) do update set xid = excluded.xid, position = excluded.position"
            " where (excluded.xid, excluded.position) > (w.xid, w.position)",
            consumer,
            cursor.xid,
            cursor.position,
        )
        await self._lazy.execute(
            "delete from inbox where consumer = $1 and xid < $2", consumer, cursor.xid
        )

    async def snapshot(self, stream: StreamName, fold_version: int) -> Snapshot | None:
        row = await self._pool.fetchrow(
            "select version, state from snapshots where stream = $1 and fold_version = $2",
            stream,
            fold_version,
        )
        return Snapshot(row["version"], row["state"]) if row else None

    async def save_snapshot(
        self, stream: StreamName, fold_version: int, snapshot: Snapshot
    ) -> None:
        await self._lazy.execute(
            "insert into snapshots as s (stream, fold_version, version, state)"
            " values ($1, $2, $3, $4) on conflict (stream, fold_version) do update"
            " set version = excluded.version, state = excluded.state"
            " where excluded.version > s.version",
            stream,
            fold_version,
            snapshot.version,
            snapshot.state,
        )

    async def artifact(self, sha256: str) -> bytes | None:
        data: bytes | None = await self._pool.fetchval(
            "select data from artifacts where sha256 = $1", sha256
        )
        return data

    async def _appended(self, ids: Sequence[EventId]) -> list[Recorded]:
        """What an edge appended before under these ids, in order."""
        rows = await self._pool.fetch(
            f"select {COLUMNS} from events where {KNOWN} order by position",  # noqa: S608 - constants
            list(ids),
        )
        return [_recorded(row) for row in rows]


def edge_ids(events: Sequence[Event], cause: UUID) -> list[EventId]:
    """The ids of what an edge appends. Raises ValueError when they would not differ."""
    ids: dict[EventId, None] = {}
    for event in events:
        event_id = EventId(derive_id(cause, f"edge|{event.stream}|{event.name}"))
        if event_id in ids:
            raise ValueError(
                f"two events {event.name} on stream {event.stream} cannot be appended under one cause: "
                "give each a cause of its own"
            )
        ids[event_id] = None
    return list(ids)


def _arguments(commit: Commit) -> tuple[Any, ...]:
    events, effects = commit.events, commit.effects
    heads = sorted((commit.expected or {}).items())
    written = {new.stream: new.version for new in events}
    gates = commit.gates
    return (
        commit.worker,
        [name for name, _ in commit.consumed],
        [event_id for _, event_id in commit.consumed],
        [effect_id for effect_id, _ in commit.finished],
        [epoch for _, epoch in commit.finished],
        [stream for stream, _ in heads],
        [version for _, version in heads],
        [written[stream] for stream, _ in heads],
        [new.id for new in events],
        [new.stream for new in events],
        [new.version for new in events],
        [new.event.type for new in events],
        [new.event.version for new in events],
        [encode(new.event) for new in events],
        [new.event.run_id for new in events],
        [new.causation for new in events],
        [new.correlation for new in events],
        [new.traceparent for new in events],
        [new.effect.id for new in effects],
        [new.consumer for new in effects],
        [new.stream for new in effects],
        [str(new.effect.lane) for new in effects],
        [new.effect.run_id for new in effects],
        [new.effect.type for new in effects],
        [new.effect.model_dump_json() for new in effects],
        [new.correlation for new in effects],
        [new.traceparent for new in effects],
        [new.claimed for new in effects],
        [artifact.sha256 for artifact in commit.artifacts],
        [artifact.data for artifact in commit.artifacts],
        [run for run, _ in gates],
        [state for _, state in gates],
    )


class Unwritable(Refused):
    """An event that the log does not take: `event` says which."""

    def __init__(self, event: Event, why: str) -> None:
        super().__init__(f"{event.type} of {event.run_id} {why}")
        self.event = event


def encode(event: Event) -> str:
    """The payload as JSON. Raises Unwritable when it is larger than an event may be, or no text."""
    try:
        data = event.model_dump_json()
    except PydanticSerializationError as error:
        raise Unwritable(event, f"cannot be written as JSON: {error}") from error
    if len(data) > MAX_EVENT_BYTES:
        raise Unwritable(
            event,
            f"has {len(data)} bytes; an event may have {MAX_EVENT_BYTES}. Make the step smaller "
            "(rollout_batch_size, n_samples_per_prompt)",
        )
    return data


def _written(new: NewEvent, row: Any) -> Recorded:
    return Recorded(
        id=new.id,
        stream=new.stream,
        version=new.version,
        cursor=Cursor(row["r_xid"], row["r_position"]),
        time=row["r_time"],
        causation=new.causation,
        correlation=new.correlation,
        traceparent=new.traceparent,
        run=new.event.run_id,
        payload=new.event,
    )


def _recorded(row: Any) -> Recorded:
    return Recorded(
        id=EventId(row["id"]),
        stream=StreamName(row["stream"]),
        version=row["version"],
        cursor=Cursor(row["xid"], row["position"]),
        time=row["time"],
        causation=row["causation"],
        correlation=row["correlation"],
        traceparent=row["traceparent"],
        run=row["run_id"],
        payload=Encoded(row["type"], row["schema_version"], row["data"]),
    )


def _known(rows: Sequence[Any]) -> list[Recorded]:
    """The rows whose type this version knows; the others are skipped."""
    return [_recorded(row) for row in rows if row["type"] in EVENT_TYPES]
