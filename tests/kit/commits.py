"""Commits of events without a cause, for tests that need events in a log."""

from typing import Any
from uuid import uuid4

from infra.spine.ports.event_log import Commit, NewEvent
from schemas.events import Event
from schemas.ids import EventId


def new_event(event: Event, version: int = 1) -> NewEvent:
    """The event as the version of its stream."""
    return NewEvent(
        id=EventId(uuid4()),
        stream=event.stream,
        version=version,
        event=event,
        causation=None,
        correlation=uuid4(),
    )


def commit_of(event: Event, version: int = 1, **more: Any) -> Commit:
    """A commit of one event at a version."""
    return Commit(expected={event.stream: version - 1}, events=(new_event(event, version),), **more)


def commit_of_streams(*events: Event) -> Commit:
    """A commit of events that each begin a stream."""
    return Commit(
        expected={event.stream: 0 for event in events}, events=tuple(map(new_event, events))
    )
