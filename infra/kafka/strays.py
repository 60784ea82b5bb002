"""Records on our topics that cannot be used: skipped and counted, and kept where they might be ours.

A record never blocks its neighbours. One of a type that nobody here knows, or that names an event
another log holds, is only counted. One that cannot be read at all is a dead letter too, with its bytes
and its headers; it is nobody's message, so no consumer's inbox is touched by it, and every group that
meets it makes the same dead letter.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from infra.ports import EventLog
from schemas.events import MAX_EVENT_BYTES, MessageDeadLettered
from schemas.ids import HEADRACE, derive_id

logger = logging.getLogger(__name__)

CONSUMER = "kafka"
"""The consumer in the name of which unreadable records are dead letters."""

HEADER_CHARS = 256
MOST_HEADERS = 32
ENVELOPE_BYTES = 16 * 1024
"""What headers and the other fields of a dead letter take at most, as JSON."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A record as it was met. `place` is topic, partition and offset, for people."""

    place: str
    headers: Mapping[str, str]
    key: bytes
    value: bytes

    @property
    def fingerprint(self) -> str:
        """The same record, wherever and whenever it is met."""
        parts = [self.key, self.value, json.dumps(sorted(self.headers.items())).encode()]
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()


async def keep(log: EventLog, stray: Stray, cause: str) -> None:
    """Make it a dead letter. Doing it again changes nothing."""
    headers = {
        name[:HEADER_CHARS]: text[:HEADER_CHARS]
        for name, text in list(stray.headers.items())[:MOST_HEADERS]
    }
    message_id = derive_id(HEADRACE, f"stray/{stray.fingerprint}")
    event = MessageDeadLettered(
        consumer=CONSUMER,
        message_id=message_id,
        message_type=headers.get("ce_type", "unknown"),
        about=headers.get("ce_runid", "unknown"),
        cause=f"{stray.place}: {cause}"[:2000],
        payload=fitting(stray.value.decode(errors="backslashreplace")),
        headers=headers,
        traceparent=headers.get("traceparent"),
    )
    logger.warning("a record that cannot be read is a dead letter: %s", event.cause)
    await log.append([event], cause=message_id)


def fitting(text: str) -> str:
    """The beginning of a text that fits into an event: as JSON it may be six times as long."""
    room = MAX_EVENT_BYTES - ENVELOPE_BYTES
    text = text[:room]
    while len(json.dumps(text)) > room:
        text = text[: len(text) // 2]
    return text
