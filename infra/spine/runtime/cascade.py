"""The read phase and the cascade: turns deliveries into one Commit, and writes nothing.

A decision may append events that other consumers of the same process read. These consumers decide at
once, in memory, until no new events appear. This is the cascade, and one call writes all its decisions.
When each consumer is a process of its own, the bus delivers the same messages one by one, and the same
streams result (tests/properties).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from infra.spine.ports.artifacts import SmallArtifact
from infra.spine.ports.effects import Claimed, NewEffect
from infra.spine.ports.event_log import Commit, CommitRefused, NewEvent, Recorded
from infra.spine.postgres.codec import Unwritable
from infra.spine.runtime.consumer import AnyConsumer, Decision, Incoming, Meta
from infra.spine.runtime.folded_states import FoldedState, StateCache, UnfoldableStream, fold
from infra.spine.runtime.newer_runs import NewerRuns
from schemas.costs.work import Work
from schemas.effects.effect import Effect
from schemas.events.event import Event
from schemas.ids import ConsumerName, EventId, StreamName, WorkerId, derive_id

logger = logging.getLogger(__name__)

DeliveryKey = tuple[ConsumerName, UUID]
"""The consumer, and the id of the message: what tells deliveries apart."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message for one consumer: an event, or the outcome of an effect that it claimed.

    `record` is the event as the log holds it, and `brought_by` is the event that the bus delivered. Both
    are None within a cascade. They differ for a dead letter that is redriven. Then the decision and its
    ids follow from the original message, and the consumer's inbox remembers the event that the bus
    delivered.
    """

    consumer: AnyConsumer
    message: Incoming
    id: UUID
    correlation: UUID
    traceparent: str | None = None
    record: Recorded | None = None
    brought_by: Recorded | None = None
    claimed: Claimed | None = None
    artifacts: tuple[SmallArtifact, ...] = ()
    seconds: float = 0.0
    work: Work | None = None

    @property
    def key(self) -> DeliveryKey:
        return (self.consumer.name, self.id)

    @property
    def inbox_id(self) -> EventId:
        """The id that its consumer's inbox remembers."""
        return self.brought_by.id if self.brought_by else EventId(self.id)

    @property
    def streams(self) -> tuple[StreamName, ...]:
        """The streams that it is decided for. An outcome goes to the stream that requested its
        effect."""
        return (self.claimed.stream,) if self.claimed else self.consumer.routes(self.message)


class DecisionError(Exception):
    """A decider raised, or made a decision that is not allowed, because of a bug or a bad message.
    `read` has the versions of its streams on which it decided. `newer` says that only a newer release
    can decide, and `unwritable` that the log cannot hold what was decided."""

    def __init__(
        self,
        delivery: Delivery,
        message: str,
        *,
        read: Mapping[StreamName, int] | None = None,
        newer: bool = False,
        unwritable: bool = False,
    ) -> None:
        kind = type(delivery.message).__name__
        super().__init__(f"{delivery.consumer.name} on {kind}: {message}")
        self.delivery = delivery
        self.read = read or {}
        self.newer = newer
        self.unwritable = unwritable


class DraftRefused(Exception):
    """The log refuses a draft, and will refuse it again. `decided` has the deliveries that the draft
    decides on. `read` has the versions of the streams on which it decides."""

    def __init__(
        self, message: str, decided: frozenset[DeliveryKey], read: Mapping[StreamName, int]
    ) -> None:
        super().__init__(message)
        self.decided = decided
        self.read = read


@dataclass(slots=True)
class Draft:
    """The decisions so far, and the states that result from them. `read` has the versions at which the
    streams were read. The decisions are valid only for these versions."""

    states: dict[StreamName, FoldedState[Any]] = field(default_factory=dict)
    read: dict[StreamName, int] = field(default_factory=dict)
    owners: dict[StreamName, AnyConsumer] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    events: list[NewEvent] = field(default_factory=list)
    effects: list[NewEffect] = field(default_factory=list)

    @property
    def event_consumers(self) -> frozenset[ConsumerName]:
        """The consumers that consume an event in this commit."""
        return frozenset(d.consumer.name for d in self.deliveries if d.claimed is None)

    @property
    def effects_performed(self) -> frozenset[tuple[ConsumerName, str]]:
        """The (consumer, effect type) whose outcomes are decided in this commit."""
        return frozenset(
            (d.consumer.name, d.claimed.effect.type) for d in self.deliveries if d.claimed
        )

    def read_for(self, delivery: Delivery) -> dict[StreamName, int]:
        """Return the stream versions for which a decision on this delivery is valid."""
        return {stream: self.read[stream] for stream in delivery.streams if stream in self.read}

    def blame_author(self, unwritable: Unwritable) -> DecisionError:
        """Return the error of the delivery whose decision has the event that the log cannot hold."""
        cause = next(new.causation for new in self.events if new.event is unwritable.event)
        author = next(delivery for delivery in self.deliveries if delivery.id == cause)
        return DecisionError(author, str(unwritable), read=self.read_for(author), unwritable=True)

    def blame_all(self, error: CommitRefused) -> DraftRefused:
        """Return the error of the whole draft, for when the log does not say which decision it
        refuses."""
        decided = frozenset(delivery.key for delivery in self.deliveries)
        return DraftRefused(str(error), decided, self.read)

    def commit(self, worker: WorkerId | None) -> Commit:
        """Return the draft as one write. An effect is not born claimed when its run's gate closes in the
        same write, because then this worker would not perform it and no other worker could claim it."""
        shut = {new.event.run_id for new in self.events if new.event.gate in ("paused", "closed")}
        self.effects = [
            replace(new, claimed=new.claimed and new.effect.run_id not in shut)
            for new in self.effects
        ]
        all_of = self.deliveries
        return Commit(
            worker=worker,
            consumed=tuple((d.consumer.name, d.inbox_id) for d in all_of if not d.claimed),
            finished=tuple((d.claimed.id, d.claimed.epoch) for d in all_of if d.claimed),
            expected=self.read,
            events=tuple(self.events),
            effects=tuple(self.effects),
            artifacts=tuple(artifact for d in all_of for artifact in d.artifacts),
            cursors={d.inbox_id: d.brought_by.cursor for d in all_of if d.brought_by},
        )


class Drafter:
    """Runs the deciders of this process over deliveries. `reserve` says whether an effect is born
    claimed by this process."""

    def __init__(
        self,
        consumers: Sequence[AnyConsumer],
        states: StateCache,
        *,
        newer_runs: NewerRuns,
        now: Callable[[], datetime],
        reserve: Callable[[Effect], bool],
    ) -> None:
        self._readers: dict[type[Event], list[AnyConsumer]] = {}
        for consumer in consumers:
            for event_type in consumer.reads:
                self._readers.setdefault(event_type, []).append(consumer)
        self._states = states
        self._newer_runs = newer_runs
        self._now = now
        self._reserve = reserve

    async def draft(
        self,
        deliveries: Sequence[Delivery],
        *,
        left_to_bus: frozenset[DeliveryKey] = frozenset(),
    ) -> Draft:
        """Decide on `deliveries` and, in waves, on everything that follows from them in this process.
        The bus delivers `left_to_bus` separately, so they are not decided here. Raises DecisionError."""
        draft = Draft()
        seen = set(left_to_bus)
        following = list(deliveries)
        try:
            while wave := _take_unseen(following, seen):
                # 2 read and fold the streams (the version of each is checked by the commit)
                await self._load(draft, wave)
                # 3 handle each message; 4 the cascade: the events decided are the next wave
                following = [cascaded for each in wave for cascaded in self._decide(draft, each)]
        except DecisionError as error:
            error.read = draft.read_for(error.delivery)
            raise
        return draft

    async def _load(self, draft: Draft, wave: Sequence[Delivery]) -> None:
        wanted: dict[StreamName, AnyConsumer] = {}
        for delivery in wave:
            wanted.update({s: delivery.consumer for s in delivery.streams if s not in draft.states})
        try:
            loaded = await self._states.load(wanted)
        except UnfoldableStream as error:
            culprit = next(delivery for delivery in wave if error.stream in delivery.streams)
            raise DecisionError(culprit, str(error), newer=error.newer) from error
        begun = {s: owner for s in loaded if loaded[s].version and (owner := owner_of(s))}
        newer = await self._newer_runs.among(begun.values())
        for delivery in wave if newer else ():
            if not newer.isdisjoint(map(begun.get, delivery.streams)):
                raise DecisionError(delivery, "the run began under a newer release", newer=True)
        draft.states.update(loaded)
        draft.read.update({stream: folded.version for stream, folded in loaded.items()})
        draft.owners.update(wanted)

    def _decide(self, draft: Draft, delivery: Delivery) -> list[Delivery]:
        """Add the decision on `delivery` to the draft. Returns the deliveries that follow from it."""
        draft.deliveries.append(delivery)
        following: list[Delivery] = []
        for stream in delivery.streams:
            meta = Meta(
                event_id=delivery.id,
                stream=stream,
                correlation=delivery.correlation,
                now=self._now(),
                seconds=delivery.seconds,
                work=delivery.work,
            )
            decision = _call_handle(delivery, draft.states[stream].state, meta)
            events = _new_events(delivery, stream, decision, draft.states[stream].version)
            draft.states[stream] = _fold_events(delivery, draft.states[stream], events)
            draft.events += events
            draft.effects += [
                NewEffect(
                    effect=effect,
                    consumer=delivery.consumer.name,
                    stream=stream,
                    correlation=delivery.correlation,
                    traceparent=delivery.traceparent,
                    claimed=self._reserve(effect),
                )
                for effect in decision.effects
            ]
            following += [cascaded for new in events for cascaded in self._deliveries_of(new)]
        return following

    def _deliveries_of(self, new: NewEvent) -> list[Delivery]:
        """Return one delivery of a new event for each consumer of this process that reads it."""
        return [
            Delivery(
                consumer=reader,
                message=new.event,
                id=new.id,
                correlation=new.correlation,
                traceparent=new.traceparent,
            )
            for reader in self._readers.get(type(new.event), ())
            if _is_for(reader, new.event)
        ]


def owner_of(stream: StreamName) -> str | None:
    """Return the run or the evaluation whose own stream this is, or None."""
    category, _, owner = stream.partition("-")
    return owner if category in ("run", "eval") else None


def _take_unseen(deliveries: Sequence[Delivery], seen: set[DeliveryKey]) -> list[Delivery]:
    """Return the deliveries that are not in `seen`, each once, and add them to `seen`."""
    fresh = []
    for delivery in deliveries:
        if delivery.key not in seen:
            seen.add(delivery.key)
            fresh.append(delivery)
    return fresh


def _is_for(reader: AnyConsumer, event: Event) -> bool:
    """Whether a reader decides on an event. If its `routes` raises, the answer is no, and the bus later
    delivers the event to this reader alone."""
    try:
        return bool(reader.routes(event))
    except Exception:  # a consumer may have any bug
        logger.exception("%s cannot route %s", reader.name, event.type)
        return False


def _fold_events(
    delivery: Delivery, folded: FoldedState[Any], events: Sequence[NewEvent]
) -> FoldedState[Any]:
    try:
        return fold(delivery.consumer, folded, [new.event for new in events])
    except Exception as error:  # a consumer may have any bug
        raise DecisionError(delivery, f"evolve: {type(error).__name__}: {error}") from error


def _call_handle(delivery: Delivery, state: object, meta: Meta) -> Decision:
    try:
        return delivery.consumer.handle(state, delivery.message, meta)
    except Exception as error:  # a consumer may have any bug
        raise DecisionError(delivery, f"{type(error).__name__}: {error}") from error


def _new_events(
    delivery: Delivery, stream: StreamName, decision: Decision, version: int
) -> list[NewEvent]:
    """Return the decision's events with their ids, which follow from the cause and the event's name."""
    consumer = delivery.consumer.name
    try:
        ids: Mapping[UUID, Event] = {
            derive_id(delivery.id, f"{consumer}|{stream}|{event.name}"): event
            for event in decision.events
        }
    except UnicodeError as error:
        raise DecisionError(
            delivery, f"the name of an event or a stream is not text: {error}"
        ) from error
    if len(ids) != len(decision.events):
        raise DecisionError(delivery, "two events of one decision have the same name")
    strangers = [event.type for event in decision.events if event.stream != stream]
    if strangers:
        raise DecisionError(delivery, f"{strangers} do not belong to {stream}")
    return [
        NewEvent(
            id=EventId(event_id),
            stream=stream,
            version=version + number,
            event=event,
            causation=delivery.id,
            correlation=delivery.correlation,
            traceparent=delivery.traceparent,
        )
        for number, (event_id, event) in enumerate(ids.items(), start=1)
    ]
