"""Dead letters: a message no decider could decide on is put aside, with its bytes and the cause.

The dead letter and the inbox row are one commit, so the message is neither lost nor met again; its
run alone pauses (the event's gate), with the reason."""

from infra.draft import Work
from infra.ports import Commit, CommitMiss, EventLog, NewEvent
from schemas.events import Event, MessageDeadLettered
from schemas.ids import EventId, derive_id

PAYLOAD_CHARS = 48_000
"""How much of the message's JSON is kept in the event (the log holds the whole)."""


async def dead_letter(log: EventLog, work: Work, cause: str) -> None:
    """Record `work` (an event) as a dead letter of its consumer. Doing it again changes nothing."""
    message = work.message
    if not isinstance(message, Event):
        raise TypeError(f"only events can be dead letters, not {type(message).__name__}")
    event = MessageDeadLettered(
        consumer=work.consumer.name,
        message_id=work.id,
        message_type=message.type,
        about=message.run_id,
        cause=cause[:2000],
        payload=message.model_dump_json()[:PAYLOAD_CHARS],
    )
    while True:
        recorded = await log.load({event.stream: 0})
        version = len(recorded.get(event.stream, ()))
        new = NewEvent(
            id=EventId(derive_id(work.id, f"{work.consumer.name}|{event.stream}|{event.name}")),
            stream=event.stream,
            version=version + 1,
            event=event,
            causation=work.id,
            correlation=work.correlation,
        )
        commit = Commit(
            consumed=((work.consumer.name, EventId(work.id)),),
            expected={event.stream: version},
            events=(new,),
        )
        try:
            await log.commit(commit)
        except CommitMiss as miss:
            if miss.kind == "duplicate":
                return
            continue
        return
