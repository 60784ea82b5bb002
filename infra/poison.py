"""Dead letters: a message that cannot be decoded, or that no decider could decide on, is put aside,
with its bytes and the cause.

The dead letter and the inbox row are one commit, so the message is neither lost nor met again; its
run alone pauses (the event's gate), with the reason."""

from infra.ports import Commit, CommitMiss, Encoded, EventLog, NewEvent, Recorded
from schemas.events import MessageDeadLettered
from schemas.ids import ConsumerName, EventId, derive_id

PAYLOAD_CHARS = 48_000
"""How much of the message's JSON is kept in the event (the log holds the whole)."""


async def dead_letter(log: EventLog, consumer: ConsumerName, message: Recorded, cause: str) -> None:
    """Record `message` as a dead letter of `consumer`. Doing it again changes nothing."""
    event = MessageDeadLettered(
        consumer=consumer,
        message_id=message.id,
        message_type=message.type,
        about=message.run,
        cause=cause[:2000],
        payload=_text(message)[:PAYLOAD_CHARS],
    )
    while True:
        recorded = await log.load({event.stream: 0})
        version = len(recorded.get(event.stream, ()))
        new = NewEvent(
            id=EventId(derive_id(message.id, f"{consumer}|{event.stream}|{event.name}")),
            stream=event.stream,
            version=version + 1,
            event=event,
            causation=message.id,
            correlation=message.correlation,
        )
        commit = Commit(
            consumed=((consumer, EventId(message.id)),),
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


def _text(message: Recorded) -> str:
    if not isinstance(message.payload, Encoded):
        return message.payload.model_dump_json()
    data = message.payload.data
    return data if isinstance(data, str) else data.decode(errors="backslashreplace")
