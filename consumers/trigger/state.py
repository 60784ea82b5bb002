"""The state of a workspace's triggers: the runs that are active or wait, for each trigger and ref."""

from dataclasses import dataclass, field, replace
from typing import assert_never

from schemas.events import (
    PushExamined,
    TriggerFired,
    TriggerQueued,
    TriggerRefused,
    TriggerSettled,
    TriggerSkipped,
    TriggerSubmitted,
)
from schemas.specs import PushOrigin

TriggerEvent = (
    PushExamined
    | TriggerQueued
    | TriggerSkipped
    | TriggerFired
    | TriggerSubmitted
    | TriggerRefused
    | TriggerSettled
)

EXAMINED_KEPT = 512
"""How many examined pushes are remembered. An older one is below the watermark and not delivered
again."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The runs of one trigger and one ref: the one that is active, and those that wait, in the order of
    their pushes. `newest` is the number of the newest push among them."""

    active: str | None = None
    queue: tuple[PushOrigin, ...] = ()
    newest: int = 0


@dataclass(frozen=True, slots=True)
class DayCount:
    """How many runs of a trigger were begun on a day."""

    day: str
    count: int


@dataclass(frozen=True, slots=True)
class TriggerState:
    """The state of the triggers of one workspace.

    - `examined` are the numbers of the pushes that were examined last.
    - `day` is the day of the last examination.
    - `scopes` are the triggers and refs that have a run, by `scope_of`.
    - `counts` are the runs of this `day`, by `counter_of`.
    - `submitting` are the runs whose submission was not answered yet.
    """

    examined: tuple[int, ...] = ()
    day: str = ""
    scopes: dict[str, Scope] = field(default_factory=dict)
    counts: dict[str, DayCount] = field(default_factory=dict)
    submitting: frozenset[str] = frozenset()

    def scope(self, origin: PushOrigin) -> Scope:
        """The scope of a trigger and ref. It is empty if nothing runs there."""
        return self.scopes.get(scope_of(origin), Scope())

    def count(self, origin: PushOrigin) -> int:
        """How many runs of this trigger were begun on the day of the last examination."""
        found = self.counts.get(counter_of(origin))
        return found.count if found is not None and found.day == self.day else 0


def scope_of(origin: PushOrigin) -> str:
    """The name of the scope in which `concurrency` counts: a trigger and a ref."""
    return f"{origin.push.ref} {counter_of(origin)}"


def counter_of(origin: PushOrigin) -> str:
    """The name under which `max_runs_per_day` counts: a trigger, on whatever ref."""
    return f"{origin.match.trigger} {origin.match.config}"


def evolve(state: TriggerState, event: TriggerEvent) -> TriggerState:
    """Return the state after one event of a trigger stream."""
    match event:
        case PushExamined():
            examined = (*state.examined, event.push.number)[-EXAMINED_KEPT:]
            return replace(state, examined=examined, day=event.day or state.day)
        case TriggerQueued():
            scope = state.scope(event.origin)
            queue = sorted((*scope.queue, event.origin), key=lambda one: one.push.number)
            waiting = replace(scope, queue=tuple(queue), newest=_newest(scope, event.origin))
            return _count(_with_scope(state, event.origin, waiting), event.origin)
        case TriggerSkipped():
            return _unqueue(state, event.origin)
        case TriggerFired():
            waited = event.origin in state.scope(event.origin).queue
            scope = replace(
                _unqueue(state, event.origin).scope(event.origin),
                active=event.run,
                newest=_newest(state.scope(event.origin), event.origin),
            )
            fired = replace(
                _with_scope(state, event.origin, scope),
                submitting=state.submitting | {event.run},
            )
            return fired if waited else _count(fired, event.origin)
        case TriggerSubmitted():
            return replace(state, submitting=state.submitting - {event.run})
        case TriggerRefused():
            answered = replace(state, submitting=state.submitting - {event.run})
            return _release(answered, event.origin, event.run)
        case TriggerSettled():
            return _release(state, event.origin, event.run)
        case _:
            assert_never(event)


def _with_scope(state: TriggerState, origin: PushOrigin, scope: Scope) -> TriggerState:
    """Return the state with this scope. A scope without runs is not kept."""
    others = {name: kept for name, kept in state.scopes.items() if name != scope_of(origin)}
    if scope.active is not None or scope.queue:
        others[scope_of(origin)] = scope
    return replace(state, scopes=others)


def _newest(scope: Scope, origin: PushOrigin) -> int:
    return max(scope.newest, origin.push.number)


def _unqueue(state: TriggerState, origin: PushOrigin) -> TriggerState:
    scope = state.scope(origin)
    left = tuple(waiting for waiting in scope.queue if waiting != origin)
    return _with_scope(state, origin, replace(scope, queue=left))


def _release(state: TriggerState, origin: PushOrigin, run: str) -> TriggerState:
    scope = state.scope(origin)
    if scope.active != run:
        return state
    return _with_scope(state, origin, replace(scope, active=None))


def _count(state: TriggerState, origin: PushOrigin) -> TriggerState:
    """Return the state with one more run of this trigger today. Counts of other days are forgotten."""
    today = {name: kept for name, kept in state.counts.items() if kept.day == state.day}
    today[counter_of(origin)] = DayCount(state.day, state.count(origin) + 1)
    return replace(state, counts=today)
