"""The one shape of a consumer: three pure functions, one that performs, and a description.

    evolve(state, event) -> state            folds the stream the consumer owns
    handle(state, message, meta) -> Decision decides on an event or on the outcome of an effect
    perform(effect, ports) -> Outcome        does the long work, under a lease, outside of any loop

`handle` and `evolve` know no clock, no randomness and no IO. Deciding nothing is a normal answer: it
makes replays harmless.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from infra.ports.ports import Ports
from schemas.effects import Effect, Outcome
from schemas.events import Event
from schemas.ids import ConsumerName, StreamName

S = TypeVar("S")
Message = Event | Outcome


@dataclass(frozen=True, slots=True)
class Meta:
    """About a message: its id (the event's, or the effect's for an outcome), the stream that is
    decided for, and the time. `now`, by the clock that stamps events, is for display; it never steers a
    decision, and neither does `seconds`: how long the effect took whose outcome the message is."""

    event_id: UUID
    stream: StreamName
    correlation: UUID
    now: datetime
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a message leads to. Both may be empty."""

    events: tuple[Event, ...] = ()
    effects: tuple[Effect, ...] = ()


NOTHING = Decision()


@dataclass(frozen=True, slots=True)
class Consumer(Generic[S]):
    """A consumer, as the runtime and the registry see it.

    `routes` maps a message to the streams of this consumer that it is decided for, in order; empty
    means "not for us". `fold_version` keys snapshots: bump it whenever `evolve` or the state change.
    `snapshots` is the state's type (as pydantic reads it) for a consumer whose streams grow long; None:
    its streams are always folded from the start.
    """

    name: ConsumerName
    category: str
    reads: tuple[type[Event], ...]
    emits: tuple[type[Event], ...]
    effects: tuple[type[Effect], ...]
    initial: S
    evolve: Callable[[S, Any], S]
    handle: Callable[[S, Any, Meta], Decision]
    routes: Callable[[Any], tuple[StreamName, ...]]
    perform: Callable[[Any, Ports], Awaitable[Outcome]] | None = None
    fold_version: int = 1
    snapshots: Any = None
