"""given(CONSUMER, *events).when(message).then(events=[...], effects=[...]): deciders without mocks.

The events are folded into the streams that the message routes to. The decision is checked as the runtime
would check it (streams, names, size).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

from infra.spine.runtime.consumer import AnyConsumer, Decision, Incoming, Meta
from schemas.effects import Effect, Outcome
from schemas.events import MAX_EVENT_BYTES, Event
from schemas.ids import HEADRACE, StreamName

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Given:
    """Streams in some state."""

    consumer: AnyConsumer
    events: tuple[Event, ...]

    def state(self, stream: StreamName) -> Any:
        """The state of a stream after the given events that belong to it."""
        state = self.consumer.initial
        for event in self.events:
            if event.stream == stream:
                state = self.consumer.evolve(state, event)
        return state

    def when(
        self, message: Incoming, *, stream: StreamName | None = None, event_id: UUID | None = None
    ) -> "When":
        """Decide on `message`. An outcome needs `stream`, the stream that requested its effect."""
        cause = event_id or uuid5(HEADRACE, repr(message))
        if isinstance(message, Outcome):
            assert stream is not None, "an outcome comes back to a stream: name it"
            streams: Sequence[StreamName] = (stream,)
        else:
            streams = self.consumer.routes(message)
        decisions = {}
        for name in streams:
            meta = Meta(event_id=cause, stream=name, correlation=cause, now=NOW)
            decisions[name] = self.consumer.handle(self.state(name), message, meta)
        return When(self, decisions)


@dataclass
class When:
    """The decisions, by stream."""

    given: Given
    decisions: dict[StreamName, Decision]
    events: list[Event] = field(init=False)
    effects: list[Effect] = field(init=False)

    def __post_init__(self) -> None:
        self.events = [e for decision in self.decisions.values() for e in decision.events]
        self.effects = [e for decision in self.decisions.values() for e in decision.effects]
        for stream, decision in self.decisions.items():
            names = [event.name for event in decision.events]
            assert len(set(names)) == len(names), f"two events have one name: {names}"
            for event in decision.events:
                assert event.stream == stream, f"{event.type} does not belong to {stream}"
                assert type(event) in self.given.consumer.emits, f"{event.type} is not announced"
                assert len(event.model_dump_json().encode()) <= MAX_EVENT_BYTES, event.type
            for effect in decision.effects:
                assert type(effect) in self.given.consumer.effects, effect.type

    def then(self, *, events: Sequence[Event] = (), effects: Sequence[Effect] = ()) -> "When":
        assert self.events == list(events)
        assert self.effects == list(effects)
        return self

    def then_types(self, *types: type[Event] | type[Effect]) -> "When":
        """Check only the types, in order: first the events, then the effects."""
        assert [type(x) for x in [*self.events, *self.effects]] == list(types)
        return self

    def then_nothing(self) -> "When":
        return self.then()

    def after(self) -> Given:
        """The streams after this decision was committed to the log."""
        return Given(self.given.consumer, (*self.given.events, *self.events))


def given(consumer: AnyConsumer, *events: Event) -> Given:
    return Given(consumer, events)
