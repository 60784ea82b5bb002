"""Turns events about dead letters into rows: one for each dead letter, waiting or redriven."""

from infra.ports.event_log import Recorded
from infra.readmodel.rows import ChangeLetter, PutLetter, Write
from schemas.events import MessageDeadLettered, MessageRedriven


def letters(recorded: Recorded) -> tuple[Write, ...]:
    """Return the row of a new dead letter, or the change to an existing row; nothing for other
    events."""
    match recorded.event:
        case MessageDeadLettered() as event:
            put = PutLetter(
                letter=str(recorded.id),
                version=recorded.version,
                consumer=event.consumer,
                message_type=event.message_type,
                about=event.about,
                cause=event.cause,
                pauses=event.pauses,
                created_at=recorded.time,
            )
            return (put,)
        case MessageRedriven() as event:
            return (ChangeLetter(str(event.letter), redriven_at=recorded.time),)
        case _:
            return ()
