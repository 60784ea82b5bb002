"""Converts decisions to the arguments of `commit_decision`, and rows of the log's tables to events."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from pydantic_core import PydanticSerializationError

from infra.spine.ports.event_log import Commit, Cursor, Encoded, NewEvent, Recorded
from schemas.errors import Refused
from schemas.events.event import MAX_EVENT_BYTES, Event
from schemas.ids import EventId, StreamName, derive_id


def edge_ids(events: Sequence[Event], cause: UUID) -> list[EventId]:
    """Return the ids of the events that an edge appends. Raises ValueError when two ids are equal."""
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


def arguments_of(commit: Commit) -> tuple[Any, ...]:
    """Return the arguments of `commit_decision`, in its order. Raises Unwritable."""
    events, effects = commit.events, commit.effects
    consumed = sorted(commit.consumed)  # all transactions lock in this order, so none deadlocks
    places = [commit.cursors.get(event_id) for _, event_id in consumed]
    heads = sorted((commit.expected or {}).items())
    written = {new.stream: new.version for new in events}
    gates, weights = commit.gates, commit.weights
    return (
        commit.worker,
        [name for name, _ in consumed],
        [event_id for _, event_id in consumed],
        [cursor and cursor.xid for cursor in places],
        [cursor and cursor.position for cursor in places],
        [effect_id for effect_id, _ in commit.finished],
        [epoch for _, epoch in commit.finished],
        [stream for stream, _ in heads],
        [version for _, version in heads],
        [written.get(stream, version) for stream, version in heads],
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
        [new.actor for new in events],
        [new.effect.size for new in effects],
        list(weights),
        list(weights.values()),
    )


class Unwritable(Refused):
    """The log cannot hold an event, which is in `event`."""

    def __init__(self, event: Event, why: str) -> None:
        super().__init__(f"{event.type} of {event.run_id} {why}")
        self.event = event


def encode(event: Event) -> str:
    """Return the payload as JSON. Raises Unwritable when it is larger than an event may be, or cannot be
    written as JSON."""
    try:
        data = event.model_dump_json()
    except PydanticSerializationError as error:
        raise Unwritable(event, f"cannot be written as JSON: {error}") from error
    if (size := len(data.encode())) > MAX_EVENT_BYTES:
        raise Unwritable(
            event,
            f"has {size} bytes; an event may have {MAX_EVENT_BYTES}. Make what it describes smaller: "
            "fewer samples in a step, shorter names and texts",
        )
    return data


def written_as(new: NewEvent, row: Any) -> Recorded:
    """Return an event as it was written. `row` is what `commit_decision` returned for it."""
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
        actor=new.actor,
    )


def recorded_in(row: Any) -> Recorded:
    """Return the event in a row of the log (`event_columns` in the queries). Its payload is not decoded
    yet."""
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
        actor=row["actor"],
    )


def known_in(rows: Sequence[Any]) -> list[Recorded]:
    """Return the events in these rows, without those that only a newer release knows."""
    return [recorded for recorded in map(recorded_in, rows) if recorded.is_known]
