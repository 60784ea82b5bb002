"""The one shape of a consumer: three pure functions, one that performs, and a description.

    evolve(state, event) -> state              folds the stream that the consumer owns
    handle(state, incoming, meta) -> Decision  decides on an event or on the outcome of an effect
    routes(event) -> streams                   says which of its streams an event is decided for
    perform(effect, ports) -> Outcome          does the long work, under a lease, outside of any loop

The three pure functions use no clock, no randomness and no IO. An empty decision is normal. It is what
makes repeated deliveries harmless.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID

from infra.spine.ports.artifacts import Artifacts
from schemas.costs.work import Work
from schemas.effects.effect import Effect, Outcome
from schemas.events.event import Event
from schemas.ids import ConsumerName, StreamName

Incoming: TypeAlias = Event | Outcome
"""The messages of a consumer: an event that it reads, or the outcome of an effect that it asked for."""

S = TypeVar("S")
"""The state of one of its streams."""

E = TypeVar("E", bound=Event)
"""The events of its own streams, which `evolve` folds."""

Prefix: TypeAlias = tuple[StreamName, int]
"""The events of a stream up to a version."""

M = TypeVar("M", bound=Incoming)
"""The messages that `handle` takes: the events that it reads, and the outcomes of its effects."""

F = TypeVar("F", bound=Effect)
"""The effects that it asks for and performs; Never for one that only decides."""

P = TypeVar("P")
"""The ports that `perform` uses: a dataclass with a port in each field; Never without `perform`."""


@dataclass(frozen=True, slots=True)
class Meta:
    """The arguments of `handle` besides the message: its id (of the event, or of the effect for an
    outcome), the stream that is decided for, and two times. `now` is the time of the clock that stamps
    events, for display. `seconds` is how long the effect of an outcome took, and `work` what it took of
    a device. No decision may depend on any of them, except that it records them."""

    event_id: UUID
    stream: StreamName
    correlation: UUID
    now: datetime
    seconds: float = 0.0
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The events and effects that follow from a message. Both may be empty."""

    events: tuple[Event, ...] = ()
    effects: tuple[Effect, ...] = ()


NOTHING = Decision()


@dataclass(frozen=True, slots=True)
class Consumer(Generic[S, E, M, F, P]):
    """A consumer, as the runtime and the registry see it.

    Its five types tie its functions together: what `perform` returns and what `reads` lists must be
    something that `handle` takes, and what `emits` lists something that `evolve` folds. `ports` is the
    type of what `perform` uses. `CONSUMER` of each module names them:
    `CONSUMER: Consumer[GradeState, GroupGraded, GradeMessage, GradeGroup, GradePorts]`.

    `routes` returns the streams of this consumer that a message is decided for, in order; empty means
    that the message is not for this consumer. `fold_version` is part of the key of snapshots: raise it
    whenever `evolve` or the state change. `snapshots` is the state's type (as pydantic reads it) for a
    consumer whose streams grow long; None: its streams are always folded from the start.
    `prefix_of` says of the first event of a stream whether the stream continues another one. Its state
    then begins with the fold of that one up to a version, which `evolve` takes over with this event.
    """

    name: ConsumerName
    category: str
    reads: tuple[type[M], ...]
    emits: tuple[type[E], ...]
    effects: tuple[type[F], ...]
    initial: S
    evolve: Callable[[S, E], S]
    handle: Callable[[S, M, Meta], Decision]
    routes: Callable[[M], tuple[StreamName, ...]]
    perform: Callable[[F, P], Awaitable[M]] | None = None
    ports: type[P] | None = None
    fold_version: int = 1
    snapshots: type[S] | None = None
    prefix_of: Callable[[E], Prefix | None] | None = None


AnyConsumer: TypeAlias = Consumer[Any, Any, Any, Any, Any]
"""A consumer of which nothing more is known, as the runtime handles them."""

PortsOf: TypeAlias = Callable[[AnyConsumer, Artifacts], object]
"""Returns the ports of a consumer (`Consumer.ports`) for one effect, whose artifacts are given."""
