"""Read phase and cascade: messages in, one Commit out. Writes nothing.

All deciders that this process hosts run here, in memory, until nothing new appears; what they decided
together is written by one call. Delivered hop by hop by separate processes, the same messages end in
the same streams (tests/properties).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from infra.ports.effects import Claimed, NewEffect
from infra.ports.event_log import Commit, CommitRefused, NewEvent, Recorded, SmallArtifact
from infra.postgres.codec import Unwritable
from infra.runtime.consumer import AnyConsumer, Decision, Incoming, Meta
from infra.runtime.folded_states import Folded, States, Unreadable, fold
from schemas.effects import Effect
from schemas.events import Event
from schemas.ids import ConsumerName, EventId, StreamName, WorkerId, derive_id

logger = logging.getLogger(__name__)


Apart = frozenset[tuple[ConsumerName, UUID]]
"""Messages of a cascade that are left for the bus to bring by themselves."""


@dataclass(frozen=True, slots=True)
class Work:
    """A message for one consumer: an event (`recorded`, when the bus brought it), or the outcome of
    an effect it claimed. A dead letter that is driven again comes with `delivered`: what it leads to
    follows from the message as it would have then, what is consumed is its delivery."""

    consumer: AnyConsumer
    message: Incoming
    id: UUID
    correlation: UUID
    traceparent: str | None = None
    recorded: Recorded | None = None
    delivered: Recorded | None = None
    claimed: Claimed | None = None
    artifacts: tuple[SmallArtifact, ...] = ()
    seconds: float = 0.0

    @property
    def delivery(self) -> EventId:
        """What its consumer's inbox remembers."""
        return self.delivered.id if self.delivered else EventId(self.id)

    @property
    def streams(self) -> tuple[StreamName, ...]:
        """Where it is decided: an outcome comes back to the stream that asked for the effect."""
        return (self.claimed.stream,) if self.claimed else self.consumer.routes(self.message)


class DecisionError(Exception):
    """A decider raised, or decided something that no decider may: a bug, or poison. `read`: on which
    versions of its streams."""

    def __init__(
        self, work: Work, message: str, *, read: Mapping[StreamName, int] | None = None
    ) -> None:
        super().__init__(f"{work.consumer.name} on {type(work.message).__name__}: {message}")
        self.work = work
        self.read = read or {}


class DraftRefused(Exception):
    """The log refuses a draft, and will again. `decided`: the messages that it decides on; `read`: on
    which versions of streams."""

    def __init__(self, message: str, decided: Apart, read: Mapping[StreamName, int]) -> None:
        super().__init__(message)
        self.decided = decided
        self.read = read


@dataclass(slots=True)
class Draft:
    """What was decided so far, with the states as they would be after it. `read` are the versions at
    which their streams were read: the decisions hold for these alone."""

    states: dict[StreamName, Folded[Any]] = field(default_factory=dict)
    read: dict[StreamName, int] = field(default_factory=dict)
    owners: dict[StreamName, AnyConsumer] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    events: list[NewEvent] = field(default_factory=list)
    effects: list[NewEffect] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.works

    @property
    def intake(self) -> frozenset[ConsumerName]:
        """The consumers that consume an event in this commit."""
        return frozenset(work.consumer.name for work in self.works if work.claimed is None)

    @property
    def performed(self) -> frozenset[tuple[ConsumerName, str]]:
        """The (consumer, effect type) whose outcomes are decided in this commit."""
        return frozenset(
            (work.consumer.name, work.claimed.effect.type) for work in self.works if work.claimed
        )

    def read_for(self, work: Work) -> dict[StreamName, int]:
        """The versions that a decision on this message holds for."""
        return {stream: self.read[stream] for stream in work.streams if stream in self.read}

    def unwritable(self, refused: Unwritable) -> DecisionError:
        """Whose decision it is that the log does not take."""
        cause = next(new.causation for new in self.events if new.event is refused.event)
        author = next(work for work in self.works if work.id == cause)
        return DecisionError(author, str(refused), read=self.read_for(author))

    def refused(self, error: CommitRefused) -> "DraftRefused":
        """What the log does not take, without saying whose fault it is."""
        decided = frozenset((work.consumer.name, work.id) for work in self.works)
        return DraftRefused(str(error), decided, self.read)

    def commit(self, worker: WorkerId | None) -> Commit:
        """The draft as one write. An effect is not born claimed when its run's gate shuts in the same
        write: nobody would perform it, and nobody else could claim it."""
        shut = {new.event.run_id for new in self.events if new.event.gate in ("paused", "closed")}
        self.effects = [
            replace(new, claimed=new.claimed and new.effect.run_id not in shut)
            for new in self.effects
        ]
        return Commit(
            worker=worker,
            consumed=tuple((w.consumer.name, w.delivery) for w in self.works if not w.claimed),
            finished=tuple((w.claimed.id, w.claimed.epoch) for w in self.works if w.claimed),
            expected=self.read,
            events=tuple(self.events),
            effects=tuple(self.effects),
            artifacts=tuple(artifact for work in self.works for artifact in work.artifacts),
            cursors={w.delivery: w.delivered.cursor for w in self.works if w.delivered},
        )


class Drafter:
    """Runs the hosted deciders over messages."""

    def __init__(
        self,
        consumers: Sequence[AnyConsumer],
        states: States,
        *,
        now: Callable[[], datetime],
        claims: Callable[[Effect], bool],
    ) -> None:
        self._readers: dict[type[Event], list[AnyConsumer]] = {}
        for consumer in consumers:
            for event_type in consumer.reads:
                self._readers.setdefault(event_type, []).append(consumer)
        self._states = states
        self._now = now
        self._claims = claims

    async def draft(self, works: Sequence[Work], *, without: Apart = frozenset()) -> Draft:
        """Decide on `works` and, in waves, on all that follows here; what is in `without` is left
        for the bus to deliver by itself. Raises DecisionError."""
        draft = Draft()
        seen = set(without)
        following = list(works)
        try:
            while wave := _unseen(following, seen):
                await self._load(draft, wave)
                following = [cascaded for work in wave for cascaded in self._decide(draft, work)]
        except DecisionError as error:
            error.read = draft.read_for(error.work)
            raise
        return draft

    async def _load(self, draft: Draft, wave: Sequence[Work]) -> None:
        wanted: dict[StreamName, AnyConsumer] = {}
        for work in wave:
            wanted.update({s: work.consumer for s in work.streams if s not in draft.states})
        try:
            loaded = await self._states.load(wanted)
        except Unreadable as error:
            culprit = next(work for work in wave if error.stream in work.streams)
            raise DecisionError(culprit, str(error)) from error
        draft.states.update(loaded)
        draft.read.update({stream: folded.version for stream, folded in loaded.items()})
        draft.owners.update(wanted)

    def _decide(self, draft: Draft, work: Work) -> list[Work]:
        draft.works.append(work)
        following: list[Work] = []
        for stream in work.streams:
            meta = Meta(
                event_id=work.id,
                stream=stream,
                correlation=work.correlation,
                now=self._now(),
                seconds=work.seconds,
            )
            decision = _handle(work, draft.states[stream].state, meta)
            events = _named(work, stream, decision, draft.states[stream].version)
            draft.states[stream] = _folded(work, draft.states[stream], events)
            draft.events += events
            draft.effects += [
                NewEffect(
                    effect=effect,
                    consumer=work.consumer.name,
                    stream=stream,
                    correlation=work.correlation,
                    traceparent=work.traceparent,
                    claimed=self._claims(effect),
                )
                for effect in decision.effects
            ]
            following += [cascaded for new in events for cascaded in self._readers_of(new)]
        return following

    def _readers_of(self, new: NewEvent) -> list[Work]:
        return [
            Work(
                consumer=reader,
                message=new.event,
                id=new.id,
                correlation=new.correlation,
                traceparent=new.traceparent,
            )
            for reader in self._readers.get(type(new.event), ())
            if _reaches(reader, new.event)
        ]


def _unseen(works: Sequence[Work], seen: set[tuple[ConsumerName, UUID]]) -> list[Work]:
    """Those that were not decided on yet, each once; from now on they are."""
    fresh = []
    for work in works:
        if (work.consumer.name, work.id) not in seen:
            seen.add((work.consumer.name, work.id))
            fresh.append(work)
    return fresh


def _reaches(reader: AnyConsumer, event: Event) -> bool:
    """Whether a reader wants an event. One that cannot say gets it from the bus, by itself."""
    try:
        return bool(reader.routes(event))
    except Exception:
        logger.exception("%s cannot say whose %s is", reader.name, event.type)
        return False


def _folded(work: Work, folded: Folded[Any], events: Sequence[NewEvent]) -> Folded[Any]:
    try:
        return fold(work.consumer, folded, [new.event for new in events])
    except Exception as error:
        raise DecisionError(work, f"evolve: {type(error).__name__}: {error}") from error


def _handle(work: Work, state: object, meta: Meta) -> Decision:
    try:
        return work.consumer.handle(state, work.message, meta)
    except Exception as error:
        raise DecisionError(work, f"{type(error).__name__}: {error}") from error


def _named(work: Work, stream: StreamName, decision: Decision, version: int) -> list[NewEvent]:
    """The decision's events with their ids, which follow from the cause and the event's name."""
    try:
        ids: Mapping[UUID, Event] = {
            derive_id(work.id, f"{work.consumer.name}|{stream}|{event.name}"): event
            for event in decision.events
        }
    except UnicodeError as error:
        raise DecisionError(
            work, f"the name of an event or a stream is not text: {error}"
        ) from error
    if len(ids) != len(decision.events):
        raise DecisionError(work, "two events of one decision have the same name")
    strangers = [event.type for event in decision.events if event.stream != stream]
    if strangers:
        raise DecisionError(work, f"{strangers} do not belong to {stream}")
    return [
        NewEvent(
            id=EventId(event_id),
            stream=stream,
            version=version + number,
            event=event,
            causation=work.id,
            correlation=work.correlation,
            traceparent=work.traceparent,
        )
        for number, (event_id, event) in enumerate(ids.items(), start=1)
    ]
