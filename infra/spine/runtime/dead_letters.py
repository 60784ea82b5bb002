"""Dead letters: a message that cannot be decoded, or decided on, is put aside with its bytes, headers
and cause.

The dead letter and the inbox row of its delivery are one commit. So the message is not lost, it is not
delivered again, and other messages continue. A message that its consumer cannot decide on holds its run:
no more effects of the run are claimed, because the consumer could not use their outcomes. `headrace dlq
redrive` appends MessageRedriven and releases the run. This event reaches the consumer like any other
event, even if the message is old.

An outcome that no decider can decide on is put aside in the same way. Its effect is released, and
performed again once the run is released.
"""

import hashlib
import json
import logging
import random
import traceback
from asyncio import sleep
from collections.abc import Mapping
from uuid import UUID

from infra.spine.ports.artifacts import ROW, SmallArtifact
from infra.spine.ports.effects import Claimed
from infra.spine.ports.event_log import (
    Commit,
    CommitMiss,
    CommitRefused,
    Cursor,
    Encoded,
    EventStore,
    NewEvent,
    Recorded,
)
from schemas.artifact_refs import ArtifactRef
from schemas.events.dead_letters import MessageDeadLettered, MessageRedriven
from schemas.ids import ConsumerName, EventId, StreamName, derive_id

logger = logging.getLogger(__name__)

CAUSE_CHARS = 2_000
PAYLOAD_JSON_BYTES = 24_000
"""How long the payload in a letter may be as JSON. A longer message is also kept whole, as an
artifact."""
TRACE_JSON_BYTES = 12_000


async def dead_letter_message(
    log: EventStore,
    consumer: ConsumerName,
    message: Recorded,
    error: Exception,
    *,
    brought_by: Recorded | None = None,
    pauses: bool = False,
    read: Mapping[StreamName, int] | None = None,
) -> None:
    """Put `message` aside for `consumer`. `brought_by` is the event that the bus delivered, if it is not
    the message itself. `read` has the versions of the streams on which the decision failed. Repeating
    the call changes nothing. Raises CommitMiss (stale) when one of these streams has new events, because
    a decision may then succeed."""
    data = _bytes(message)
    letter, content = letter_of(
        consumer, data, error, message_id=message.id, message_type=message.type, about=message.run
    )
    letter = letter.model_copy(
        update={
            "headers": _headers(message),
            "traceparent": message.traceparent,
            "message_stream": message.stream,
            "message_version": message.version,
            "pauses": pauses,
        }
    )
    brought_by = brought_by or message
    consumed = (consumer, brought_by.id)
    cursors = {brought_by.id: brought_by.cursor}
    await write_letter(
        log, letter, content, consumed, message.correlation, read=read, cursors=cursors
    )


async def dead_letter_outcome(
    log: EventStore,
    claimed: Claimed,
    error: Exception,
    *,
    read: Mapping[StreamName, int] | None = None,
) -> None:
    """Put aside an effect whose outcome cannot be decided on, and hold its run. Raises CommitMiss as
    `dead_letter_message` does."""
    data = claimed.effect.model_dump_json().encode()
    letter, content = letter_of(
        claimed.consumer,
        data,
        error,
        message_id=claimed.id,
        message_type=claimed.effect.type,
        about=claimed.effect.run_id,
    )
    letter = letter.model_copy(
        update={
            "headers": {"lane": str(claimed.effect.lane), "attempts": str(claimed.attempts)},
            "traceparent": claimed.traceparent,
            "message_stream": claimed.stream,
            "pauses": True,
        }
    )
    delivery = EventId(derive_id(claimed.id, f"outcome/{claimed.epoch}"))
    consumed = (claimed.consumer, delivery)
    await write_letter(log, letter, content, consumed, claimed.correlation, read=read)


async def find_redriven(
    log: EventStore, consumer: ConsumerName, event: MessageRedriven
) -> Recorded | None:
    """Return the message to deliver to `consumer` again. Returns None when it is for another consumer,
    and when it is an outcome, because the effect of an outcome is performed again without a redrive."""
    if event.consumer != consumer or not event.message_version:
        return None
    found = await log.events_at([(event.message_stream, event.message_version)])
    return next((recorded for recorded in found if recorded.id == event.message_id), None)


def letter_of(
    consumer: str,
    data: bytes,
    error: Exception,
    *,
    message_id: object,
    message_type: str,
    about: str,
) -> tuple[MessageDeadLettered, tuple[SmallArtifact, ...]]:
    """Return the dead letter of some bytes, and an artifact with all bytes if the letter cannot hold
    them."""
    text = data.decode(errors="backslashreplace")
    payload = _truncate_json(text, PAYLOAD_JSON_BYTES)
    is_whole = payload.encode() == data
    sha256 = hashlib.sha256(data).hexdigest()
    letter = MessageDeadLettered.model_validate(
        {
            "consumer": consumer,
            "message_id": message_id,
            "message_type": message_type,
            "about": about,
            "cause": _truncate_json(str(error), CAUSE_CHARS),
            "payload": payload,
            "content": None
            if is_whole
            else ArtifactRef(uri=ROW + sha256, sha256=sha256, size=len(data)),
            "trace": _truncate_json(_trace(error), TRACE_JSON_BYTES),
        }
    )
    return letter, () if is_whole else (SmallArtifact(sha256, data),)


async def write_letter(
    log: EventStore,
    letter: MessageDeadLettered,
    content: tuple[SmallArtifact, ...],
    consumed: tuple[ConsumerName, EventId],
    correlation: UUID,
    *,
    read: Mapping[StreamName, int] | None = None,
    cursors: Mapping[EventId, Cursor] | None = None,
) -> None:
    """Write a dead letter, together with the inbox row `consumed`. Repeating the call changes nothing.
    Raises CommitMiss (stale) when a stream in `read` does not have its version any more."""
    delivery = consumed[1]
    logger.error("%s: %s is a dead letter: %s", letter.consumer, letter.message_type, letter.cause)
    while True:
        version = (await log.versions([letter.stream]))[letter.stream]
        new = NewEvent(
            id=EventId(derive_id(delivery, f"{letter.consumer}|{letter.stream}|{letter.name}")),
            stream=letter.stream,
            version=version + 1,
            event=letter,
            causation=delivery,
            correlation=correlation,
            traceparent=letter.traceparent,
        )
        commit = Commit(
            consumed=(consumed,),
            expected={**(read or {}), letter.stream: version},
            events=(new,),
            artifacts=content,
            cursors=cursors or {},
        )
        try:
            await log.commit(commit)
            return
        except CommitRefused:
            if _is_ascii(letter):
                raise
            letter, content = _in_ascii(letter, content)
        except CommitMiss as miss:
            if miss.kind == "duplicate":
                return
            if miss.what in (read or {}):
                raise
            await sleep(random.uniform(0, 0.01))  # noqa: S311 - jitter


def _is_ascii(letter: MessageDeadLettered) -> bool:
    text = letter.model_dump_json()
    return text.isascii() and "\\u0000" not in text


def _in_ascii(
    letter: MessageDeadLettered, content: tuple[SmallArtifact, ...]
) -> tuple[MessageDeadLettered, tuple[SmallArtifact, ...]]:
    """Return the same letter in ASCII, for a database that cannot hold its text. The artifact has the
    complete letter."""
    ref = letter.content
    if ref is None:
        data = letter.payload.encode()
        sha256 = hashlib.sha256(data).hexdigest()
        ref = ArtifactRef(uri=ROW + sha256, sha256=sha256, size=len(data))
        content = (SmallArtifact(sha256, data),)
    texts = {name: _ascii(text) for name, text in letter if isinstance(text, str)}
    headers = {_ascii(name): _ascii(text) for name, text in letter.headers.items()}
    return letter.model_copy(update={**texts, "headers": headers, "content": ref}), content


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode().replace("\0", "?")


def _bytes(message: Recorded) -> bytes:
    if not isinstance(message.payload, Encoded):
        return message.payload.model_dump_json().encode()
    data = message.payload.data
    return data if isinstance(data, bytes) else data.encode(errors="surrogateescape")


def _headers(message: Recorded) -> dict[str, str]:
    """Return the headers that a broker's record of the message would have."""
    payload = message.payload
    found = {
        "ce_id": str(message.id),
        "ce_type": message.type,
        "ce_subject": message.stream,
        "ce_time": message.time.isoformat(),
        "ce_dataversion": str(payload.version),
        "ce_streamversion": str(message.version),
        "ce_runid": message.run,
        "ce_correlationid": str(message.correlation),
        "ce_causationid": str(message.causation or ""),
        "ce_cursor": str(message.cursor),
        "traceparent": message.traceparent or "",
    }
    return {name: text for name, text in found.items() if text}


def _trace(error: Exception) -> str:
    """Return the innermost calls of the traceback, because they are nearest to the cause."""
    return "".join(traceback.format_exception(error))[-TRACE_JSON_BYTES:]


def _truncate_json(text: str, num_bytes: int) -> str:
    """Return about the longest beginning of a text that has at most `num_bytes` bytes as JSON (a
    character may take six)."""
    text = text[:num_bytes].encode(errors="backslashreplace").decode()
    while len(json.dumps(text)) > num_bytes:
        text = text[: len(text) * 3 // 4]
    return text
