"""The ports: what the runtime and the consumers need of the world, as protocols.

Here are log, effects and bus with the values that they exchange; what lies outside of the database is in
`infra/ports/services.py`. Every adapter of a port passes the same contract suite (tests/contracts).
Engines (Sampler, Learner) are protocols of `schemas`, because trainer implements them.
"""

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from infra.ports.services import Artifacts, Blobs, Datasets, Gateway, Repositories, UserCode
from schemas.effects import Effect, Lane
from schemas.envelope import decode_event
from schemas.errors import Refused
from schemas.events import Event
from schemas.ids import ConsumerName, EffectId, EventId, StreamName, WorkerId
from schemas.learner import Learner
from schemas.sampling import Sampler

if TYPE_CHECKING:
    from infra.settings.settings import Settings


class Clock(Protocol):
    """`now` is for people to read and may jump; `elapsed_s` only ever grows, from wherever it began:
    durations are its differences."""

    def now(self) -> datetime: ...
    def elapsed_s(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A position in the log: ordered by transaction, then by position. Opaque outside infra."""

    xid: int = 0
    position: int = 0

    def __str__(self) -> str:
        return f"{self.xid:x}-{self.position:x}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read a cursor back. Raises ValueError when `text` is not one."""
        xid, _, position = text.partition("-")
        return cls(int(xid, 16), int(position, 16))


@dataclass(frozen=True)
class Recorded:
    """An event as the log holds it. `payload` is the event, or still its JSON: most of what a tail
    passes was consumed long ago, and is never looked into."""

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

    @property
    def type(self) -> str:
        return self.payload.type

    @cached_property
    def event(self) -> Event:
        """The event, decoded once. Raises UnknownEvent and BadEvent (`schemas.envelope`)."""
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


@dataclass(frozen=True, slots=True)
class NewEffect:
    """An effect to write. `claimed`: born claimed by the worker that commits it, with epoch 1."""

    effect: Effect
    consumer: ConsumerName
    stream: StreamName
    correlation: UUID
    traceparent: str | None = None
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """An effect this worker holds, under `epoch`. `spent`: its workers died too often (crashes over
    the limit); it must not be performed again but end as Failed(CRASH)."""

    id: EffectId
    effect: Effect
    consumer: ConsumerName
    stream: StreamName
    epoch: int
    attempts: int
    crashes: int
    correlation: UUID
    traceparent: str | None
    memo: str | None = None
    spent: bool = False

    @classmethod
    def born(cls, new: NewEffect) -> "Claimed":
        """The claim of an effect that was born claimed."""
        return cls(
            id=new.effect.id,
            effect=new.effect,
            consumer=new.consumer,
            stream=new.stream,
            epoch=1,
            attempts=0,
            crashes=0,
            correlation=new.correlation,
            traceparent=new.traceparent,
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """What a worker holds: effect -> epoch. `generation`: how often it has disowned claims."""

    generation: int
    claims: Mapping[EffectId, int]


class Disowned(Exception):
    """A claim was asked for under a generation that is over: nothing was claimed."""

    def __init__(self, worker: WorkerId, generation: int) -> None:
        super().__init__(f"{worker} claimed under generation {generation}, which is over")


@dataclass(frozen=True, slots=True)
class Commit:
    """One decision, to be written whole or not at all.

    `expected` are the versions of every stream that the decision was made on, whether or not it gets an
    event: all must still have them. A stream that does not exist has version 0.
    `cursors` are where the consumed events lie, for those that are in the log already: they must lie
    above the watermarks of their consumers.
    `finished` are the effects whose outcomes are decided here, with the claim epochs that fence them.
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
        """What stands in columns of text: names, and traces."""
        for new in self.events:
            yield from (new.stream, new.event.run_id, new.traceparent or "")
        for asked in self.effects:
            yield from (asked.stream, asked.effect.run_id, asked.traceparent or "")

    @property
    def gates(self) -> Sequence[tuple[str, str]]:
        """How these events move the gates of their runs: the last word of each run, and every hold."""
        states = {new.event.run_id: new.event.gate for new in self.events if new.event.gate}
        holds = [(new.event.run_id, new.event.hold) for new in self.events if new.event.hold]
        return [*states.items(), *holds]

    @property
    def asks(self) -> bool:
        """Whether there may now be something to claim: an effect that nobody holds yet, or those of a
        run whose gate moved."""
        return bool(self.gates) or not all(new.claimed for new in self.effects)


@dataclass(frozen=True, slots=True)
class SmallArtifact:
    """An artifact of at most 64 KiB that is written as a row, with the event that refers to it."""

    sha256: str
    data: bytes


class CommitMiss(Exception):
    """Nothing was written: what was read is no longer so. Read again and decide again.

    kind `stale`: a stream moved; `duplicate`: an event was consumed (its inbox row exists, or it lies
    below its consumer's watermark); `fenced`: a claim was lost (its effect is finished, or another
    worker holds it). `what` names the stream, event or effect.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind
        self.what = what


class CommitRefused(Refused):
    """Nothing was written, and never will be: the decision says what the database cannot hold."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folded state (as JSON text) of a stream at a version."""

    version: int
    state: str


class EventLog(Protocol):
    """The truth. Reads take no transaction id; `commit` is one call. What is asked `as_of` a turn that
    is over raises Turned (`infra/postgres/history.py`)."""

    @property
    def turns(self) -> int:
        """How often the log was seen to be another one: who kept anything of it starts again."""
        ...

    async def load(
        self, streams: Mapping[StreamName, int], *, limit: int | None = None
    ) -> Mapping[StreamName, Sequence[Recorded]]:
        """The events of each stream above the given version, in order of version; of all together the
        first `limit`, stream by stream."""
        ...

    async def versions(self, streams: Iterable[StreamName]) -> Mapping[StreamName, int]:
        """The version of each stream; 0 for one that does not exist."""
        ...

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        """Write a whole decision, return its events as recorded. Raises CommitMiss, CommitRefused;
        Unwritable (`infra.postgres.codec`) where one event is known to be the reason."""
        ...

    async def append(
        self, events: Sequence[Event], *, cause: UUID, traceparent: str | None = None
    ) -> Sequence[Recorded]:
        """Append from an edge, at whatever version the streams have. The ids follow from `cause` and
        each event's stream and name: appending again under the same cause, however much later,
        appends nothing and returns what was appended before. Raises ValueError when two of these
        events have the same stream and name, for they would have the same id."""
        ...

    async def tail(
        self,
        after: Cursor,
        *,
        limit: int,
        types: Sequence[str] | None = None,
        upto: Cursor | None = None,
    ) -> tuple[Sequence[Recorded], Cursor]:
        """Events after a cursor in (xid, position) order, below the transaction horizon, and the cursor
        to go on from (it moves past events of other types too). With `upto`, which `head` has
        returned: all events up to there."""
        ...

    async def ahead(self, after: Cursor) -> bool:
        """Whether events are committed above `after`, be it that the horizon still hides them from
        `tail`: then it is worth looking again soon."""
        ...

    async def head(self) -> Cursor:
        """The cursor of the last event below the horizon. No event can appear below it any more."""
        ...

    async def reaches(self, cursor: Cursor) -> bool:
        """Whether an event is there at `cursor` or above, hidden by the horizon or not. A log that was
        read up to `cursor` and does not reach it any more went back."""
        ...

    async def now(self) -> datetime:
        """The time by the clock that stamps its events."""
        ...

    async def held(self, places: Sequence[tuple[StreamName, int]]) -> Sequence[Recorded]:
        """The events at these versions of these streams, as far as there are any."""
        ...

    async def awaited(
        self, places: Mapping[tuple[StreamName, int], Collection[ConsumerName]]
    ) -> Sequence[tuple[Recorded, frozenset[ConsumerName]]]:
        """`held`, each event with those of the consumers named for its place that have not consumed it
        (as `due` says): both at the price of one."""
        ...

    async def read(
        self, run: str, *, after: Cursor, limit: int, types: Sequence[str] | None = None
    ) -> Sequence[Recorded]:
        """A run's events in log order, below the horizon: for readers, not for consumers."""
        ...

    async def consumed(
        self, keys: Sequence[tuple[ConsumerName, EventId]]
    ) -> frozenset[tuple[ConsumerName, EventId]]:
        """Which of these have an inbox row."""
        ...

    async def due(
        self, messages: Sequence[tuple[ConsumerName, Recorded]]
    ) -> Sequence[tuple[ConsumerName, Recorded]]:
        """Those of these messages that their consumer has not consumed: they lie above its watermark
        (as it stands now) and have no inbox row."""
        ...

    async def watermark(self, consumer: ConsumerName) -> Cursor: ...

    async def advance(self, consumers: Sequence[ConsumerName], cursor: Cursor) -> None:
        """These have consumed everything up to `cursor`: move their watermarks forward (never back) and
        delete their inbox rows below it."""
        ...

    async def snapshot(self, stream: StreamName, fold_version: int) -> Snapshot | None: ...
    async def save_snapshot(
        self, stream: StreamName, fold_version: int, snapshot: Snapshot
    ) -> None: ...
    async def artifact(self, sha256: str) -> bytes | None:
        """A small artifact's bytes."""
        ...


class Effects(Protocol):
    """Claims and leases over the effect rows."""

    async def register(
        self, worker: WorkerId, *, host: str, pid: int, lease_s: float, lanes: Sequence[Lane] = ()
    ) -> None: ...
    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        """Extend the worker's lease. False when it has expired or was taken: stop performing."""
        ...

    async def expire(self, worker: WorkerId) -> None:
        """End a lease at once (its process is known to be dead, or leaves)."""
        ...

    async def claim(
        self,
        worker: WorkerId,
        *,
        lanes: Sequence[Lane],
        consumers: Sequence[ConsumerName],
        limit: int,
        generation: int = 0,
    ) -> Sequence[Claimed]:
        """Claim due effects, within a lane of a consumer the one that is due the longest first: gate
        open, no live claim, and not held by this worker already. Epoch + 1 each; a claim taken over
        from a dead worker counts a crash. A worker whose own lease ran out gets nothing. Raises
        Disowned, with nothing claimed, when `generation` is not the worker's any more: a claim that a
        network delivers late must take nothing, for nobody would know of it."""
        ...

    async def retry(
        self, claimed: Claimed, *, delay_s: float, error: str, counted: bool = True
    ) -> None:
        """Give back for later: attempts + 1 if `counted`. Nothing happens if the claim was lost."""
        ...

    async def release(self, claimed: Claimed) -> None:
        """Give back without counting an attempt (pause, shutdown)."""
        ...

    async def holding(self, worker: WorkerId) -> Holding:
        """What the worker holds, and its generation (0 until it has disowned anything)."""
        ...

    async def disown(
        self, worker: WorkerId, *, generation: int, keep: Sequence[EffectId]
    ) -> int | None:
        """Give back, without counting anything, what the worker holds beyond `keep`: claims whose
        answers never reached it. In the same breath its generation is raised, so that those that are
        still on their way take nothing; returns the new one. None, with nothing given back, when
        `generation` is not the worker's: a call that comes late must not give back what it holds now."""
        ...

    async def memo(self, claimed: Claimed, memo: str) -> bool:
        """Remember something for a successor, under the epoch. False if the claim was lost."""
        ...

    async def gates(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """The gates of these runs (a run that is held is paused); one without a row is open."""
        ...

    async def next_due_s(
        self, worker: WorkerId, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> float | None:
        """Seconds until there may be something to claim that is not there now: the next effect of these
        lanes and consumers is due, or the lease of another worker that holds any runs out. Or None."""
        ...

    async def depth(self) -> Mapping[str, int]:
        """Effects per lane that are waiting or claimed."""
        ...

    async def left(self, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]) -> int:
        """How many effects of these lanes and consumers there are, waiting (be it for a later time) or
        claimed, but for those of runs that are paused, held or closed."""
        ...


class Bus(Protocol):
    """Wakes consumers. At least once, in no global order; the log stays the truth."""

    def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Sequence[tuple[ConsumerName, Recorded]], None]:
        """Batches of (consumer, event) to decide on, for ever; the next batch comes once this one is
        acknowledged. It may deliver again what never was. Close the generator to leave."""
        ...

    async def acknowledge(self, batch: Sequence[tuple[ConsumerName, Recorded]]) -> None:
        """The decisions on this batch are committed."""
        ...

    async def idle(self) -> bool:
        """Whether everything in the log that the subscribed consumers read was acknowledged."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """What `perform` may use. A process that does not take a lane has None in its place."""

    log: EventLog
    blobs: Blobs
    artifacts: Artifacts
    datasets: Datasets
    clock: Clock
    settings: "Settings"
    repositories: Repositories | None = None
    sampler: Sampler | None = None
    learner: Learner | None = None
    user: UserCode | None = None
    gateway: Gateway | None = None
