"""The port to the event log: its records, the contents of a commit, and the queries that it answers.

`EventLog` is three protocols, so that each caller names only what it needs: `EventStore` reads and
writes streams, `LogTail` follows the whole log in order, `Inbox` knows which consumer has consumed
which event.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Protocol
from uuid import UUID

from infra.spine.ports.artifacts import SmallArtifact
from infra.spine.ports.effects import NewEffect
from schemas.envelope import current_type, decode_event, is_known
from schemas.errors import Refused
from schemas.events.event import Event
from schemas.ids import ConsumerName, EffectId, EventId, StreamName, WorkerId

CURSOR = re.compile(r"([0-9a-f]{1,15}|[0-7][0-9a-f]{15})-([0-9a-f]{1,15}|[0-7][0-9a-f]{15})")


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A position in the log. Cursors are ordered by transaction, then by position; outside of infra they
    are opaque."""

    xid: int = 0
    position: int = 0

    def __str__(self) -> str:
        return f"{self.xid:x}-{self.position:x}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read a cursor back. Raises ValueError when `text` is not one."""
        found = CURSOR.fullmatch(text)
        if found is None:
            raise ValueError("a cursor is two hexadecimal numbers of at most 63 bits")
        return cls(int(found[1], 16), int(found[2], 16))


@dataclass(frozen=True)
class Recorded:
    """An event as the log holds it. `payload` is the event, or its JSON until it is needed, because most
    events that a tail passes were consumed long ago and are never decoded. `actor` is the sender of the
    request that appended it (`infra/spine/ports/appender.py`); None when a consumer did."""

    id: EventId
    stream: StreamName
    version: int
    cursor: Cursor
    time: datetime
    causation: UUID | None
    correlation: UUID
    traceparent: str | None
    run: str
    payload: "Event | Encoded" = field(compare=False)
    actor: str | None = None

    @property
    def type(self) -> str:
        """The type that its events have today. `payload` has the one under which it was stored."""
        return current_type(self.payload.type)

    @property
    def is_known(self) -> bool:
        """Whether this release knows its type and version. Only a newer release can use it otherwise."""
        return is_known(self.payload.type, self.payload.version)

    @cached_property
    def event(self) -> Event:
        """The event, decoded once. Raises NewerEvent and BadEvent (`schemas.envelope`)."""
        if isinstance(self.payload, Event):
            return self.payload
        return decode_event(self.payload.type, self.payload.version, self.payload.data)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An event's payload as JSON, with the type and version it was written under."""

    type: str
    version: int
    data: str | bytes


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to append at `version` of its stream (the first event of a stream has version 1)."""

    id: EventId
    stream: StreamName
    version: int
    event: Event
    causation: UUID | None
    correlation: UUID
    traceparent: str | None = None
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """One decision, to be written whole or not at all.

    `expected` has the version of every stream that the decision was made on, whether or not the stream
    gets an event. All streams must still have these versions. A stream that does not exist has version
    0. `cursors` has the positions of those consumed events that are in the log already. They must be
    above the watermarks of their consumers. `finished` has the effects whose outcomes are decided here,
    with their claim epochs. An outcome with an older epoch is rejected.
    """

    worker: WorkerId | None = None
    consumed: tuple[tuple[ConsumerName, EventId], ...] = ()
    finished: tuple[tuple[EffectId, int], ...] = ()
    expected: Mapping[StreamName, int] | None = None
    events: tuple[NewEvent, ...] = ()
    effects: tuple[NewEffect, ...] = ()
    artifacts: tuple["SmallArtifact", ...] = ()
    cursors: Mapping[EventId, Cursor] = field(default_factory=dict)

    @property
    def texts(self) -> Iterable[str]:
        """Yield the values of text columns: names and traces."""
        for new in self.events:
            yield from (new.stream, new.event.run_id, new.traceparent or "", new.actor or "")
        for effect in self.effects:
            yield from (effect.stream, effect.effect.run_id, effect.traceparent or "")

    @property
    def gates(self) -> Sequence[tuple[str, str]]:
        """Return how these events move the gates of their runs: the last state of each run, every hold,
        and the decider version that a process needs to work on a run."""
        states = {new.event.run_id: new.event.gate for new in self.events if new.event.gate}
        holds = [(new.event.run_id, new.event.hold) for new in self.events if new.event.hold]
        needed = [
            (new.event.run_id, f"decider {new.event.needed_decider}")
            for new in self.events
            if new.event.needed_decider > 1
        ]
        return [*states.items(), *holds, *needed]

    @property
    def weights(self) -> Mapping[str, int]:
        """Return the weights that these events give to their runs."""
        found = ((new.event.run_id, new.event.weight) for new in self.events)
        return {run: weight for run, weight in found if weight is not None}

    @property
    def may_bring_claims(self) -> bool:
        """Whether this commit may make effects claimable: it has an effect that no worker holds, or it
        moves the gate of a run."""
        return bool(self.gates) or not all(new.claimed for new in self.effects)


@dataclass(frozen=True, slots=True)
class EdgeAppend:
    """An event that an edge appends, at any version of its stream. Its id follows from `cause`, its
    stream and its name."""

    event: Event
    cause: UUID
    traceparent: str | None = None
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class EdgeAppended:
    """An event of an edge as the log holds it. `is_new` is False when it was in the log before."""

    recorded: Recorded
    is_new: bool


class CommitMiss(Exception):
    """Nothing was written, because the log has changed since it was read. Read again and decide again.

    `kind` is one of three. `stale`: a stream has new events. `duplicate`: an event was consumed already
    (its inbox row exists, or it lies below its consumer's watermark). `fenced`: a claim was lost (its
    effect is finished, or another worker holds it). `what` names the stream, event or effect.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind
        self.what = what


class CommitRefused(Refused):
    """Nothing was written, and a retry does not help, because the database cannot hold the decision."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The folded state of a stream at a version, as JSON text."""

    version: int
    state: str


class EventStore(Protocol):
    """Streams of events, with their snapshots and small artifacts. Reads take no transaction id;
    `commit` is one call. A call `as_of` an epoch that is over raises HistoryChanged
    (`infra/spine/postgres/history.py`)."""

    @property
    def history_epoch(self) -> int:
        """How often the log was found to have another history, for example after a restore. A caller
        that keeps data from the log must read it again when this number changes."""
        ...

    async def load(
        self, streams: Mapping[StreamName, int], *, limit: int | None = None
    ) -> Mapping[StreamName, Sequence[Recorded]]:
        """Return the events of each stream above the given version, in order of version. `limit` is the
        most events over all streams, which are read one after the other."""
        ...

    async def versions(self, streams: Iterable[StreamName]) -> Mapping[StreamName, int]:
        """Return the version of each stream; 0 for one that does not exist."""
        ...

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        """Write a whole decision, and return its events as recorded. Raises CommitMiss and
        CommitRefused, or Unwritable (`infra.spine.postgres.codec`) when one event is known to be the
        reason."""
        ...

    async def append(
        self, events: Sequence[Event], *, cause: UUID, traceparent: str | None = None
    ) -> Sequence[Recorded]:
        """Append events of an edge, at any version of their streams. The ids follow from `cause` and
        each event's stream and name. A second call with the same cause, even much later, appends nothing
        and returns the events that were appended before. The events name the appender of the task
        that calls (`infra/spine/ports/appender.py`). Raises ValueError when two of these events have
        the same stream and name, because they would have the same id."""
        ...

    async def append_all(self, batch: Sequence[EdgeAppend]) -> Sequence[EdgeAppended | Refused]:
        """Append the events of many causes, in one commit. Returns what became of each entry: the event
        as recorded, or the error when the log refuses this entry, which holds up no other entry. An
        entry whose event is in the log, or was earlier in the batch, appends nothing."""
        ...

    async def read(
        self, run: str, *, after: Cursor, limit: int, types: Sequence[str] | None = None
    ) -> Sequence[Recorded]:
        """Return a run's events in log order, below the horizon, without those that only a newer release
        knows. This is for readers, not for consumers."""
        ...

    async def events_at(self, places: Sequence[tuple[StreamName, int]]) -> Sequence[Recorded]:
        """Return the events at these versions of these streams. A place without an event is left out."""
        ...

    async def clock_time(self) -> datetime:
        """Return the time by the clock that stamps the events of this log."""
        ...

    async def snapshot(
        self, stream: StreamName, fold_version: int, *, upto: int | None = None
    ) -> Snapshot | None:
        """Return the newest snapshot of a stream for this version of its fold, or None. `upto` is the
        newest version of the stream that it may have."""
        ...

    async def save_snapshot(
        self,
        stream: StreamName,
        fold_version: int,
        snapshot: Snapshot,
        *,
        keep_every: int | None = None,
    ) -> None:
        """Keep this snapshot, and forget older ones. With `keep_every`, the first snapshot in each so
        many versions of the stream is kept too, so that an earlier state is folded from near it."""
        ...

    async def artifact(self, sha256: str) -> bytes | None:
        """Return the bytes of a small artifact, or None if there is none."""
        ...


class LogTail(Protocol):
    """The whole log in order, for readers that follow its end."""

    @property
    def history_epoch(self) -> int:
        """As `EventStore.history_epoch`: a reader that keeps a cursor starts again when this changes."""
        ...

    async def tail(
        self,
        after: Cursor,
        *,
        limit: int,
        types: Sequence[str] | None = None,
        upto: Cursor | None = None,
    ) -> tuple[Sequence[Recorded], Cursor]:
        """Return the events after a cursor in (xid, position) order, below the transaction horizon, and
        the cursor to continue from, which also moves past events of other types. Events that this
        release does not know (`Recorded.is_known`) are returned too. `upto` is a result of
        `visible_head`. With it, only the events up to there are returned."""
        ...

    async def has_events_after(self, after: Cursor) -> bool:
        """Whether events are committed above `after`, including those that the horizon still hides from
        `tail`. If so, it is worth reading the tail again soon."""
        ...

    async def visible_head(self) -> Cursor:
        """Return the cursor of the last event below the horizon. No event can appear below it any
        more."""
        ...

    async def reaches(self, cursor: Cursor) -> bool:
        """Whether there is an event at `cursor` or above, hidden by the horizon or not. If a log was
        read up to `cursor` and does not reach it any more, its database was restored to an earlier
        state."""
        ...


class Inbox(Protocol):
    """Which consumer has consumed which event."""

    async def filter_consumed(
        self, keys: Sequence[tuple[ConsumerName, EventId]]
    ) -> frozenset[tuple[ConsumerName, EventId]]:
        """Return those of these keys that have an inbox row."""
        ...

    async def unconsumed(
        self, messages: Sequence[tuple[ConsumerName, Recorded]]
    ) -> Sequence[tuple[ConsumerName, Recorded]]:
        """Return those of these messages that their consumer has not consumed. They are above its
        current watermark and have no inbox row."""
        ...

    async def unconsumed_at(
        self, places: Mapping[tuple[StreamName, int], Collection[ConsumerName]]
    ) -> Sequence[tuple[Recorded, frozenset[ConsumerName]]]:
        """Return the events at these places, each with the consumers that are named for its place and
        have not consumed it. This is `events_at` and `unconsumed` in one query."""
        ...

    async def watermark(self, consumer: ConsumerName) -> Cursor:
        """Return the cursor up to which a consumer has consumed everything."""
        ...

    async def advance(self, consumers: Sequence[ConsumerName], cursor: Cursor) -> None:
        """Record that these consumers have consumed everything up to `cursor`. This moves their
        watermarks there (never back) and deletes their inbox rows below it."""
        ...


class EventLog(EventStore, LogTail, Inbox, Protocol):
    """The whole port, as an adapter implements it. The log is the truth: everything else follows from
    it."""
