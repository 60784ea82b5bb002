"""Records on our topics that cannot be used: skipped, counted, and kept if they might be ours.

A record never blocks the ones after it. A record of an unknown type, or one that names an event of
another log, is only counted. A record that cannot be read at all also becomes a dead letter, with its
bytes and headers. It is not a message of any consumer, so it leaves no inbox row, and every group that
meets it makes the same dead letter.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from infra.spine.ports.event_log import Commit, EventStore
from infra.spine.runtime.dead_letters import letter_of
from schemas.envelope import BadEvent
from schemas.ids import HEADRACE, derive_id

logger = logging.getLogger(__name__)

CONSUMER = "kafka"
"""The consumer name that dead letters of unreadable records carry."""

HEADER_CHARS = 256
MOST_HEADERS = 32
KEPT_BYTES = 1 << 20
"""The largest record that a broker accepts by default."""


@dataclass(frozen=True, slots=True)
class UnusableRecord:
    """A record as it was read. `place` is its topic, partition and offset, for people."""

    place: str
    headers: Mapping[str, str]
    key: bytes
    value: bytes

    @property
    def fingerprint(self) -> str:
        """Equal for the same record, wherever and whenever it is read."""
        parts = [self.key, self.value, json.dumps(sorted(self.headers.items())).encode()]
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()


async def keep_as_dead_letter(log: EventStore, record: UnusableRecord, cause: str) -> None:
    """Make the record a dead letter. Repeating this changes nothing. Of a record that is larger than
    any event only the beginning is kept; the broker has the rest until its retention ends."""
    headers = {
        _plain(name): _plain(text) for name, text in list(record.headers.items())[:MOST_HEADERS]
    }
    stray_id = derive_id(HEADRACE, f"stray/{record.fingerprint}")
    letter, content = letter_of(
        CONSUMER,
        record.value[:KEPT_BYTES],
        BadEvent(f"{record.place} ({len(record.value)} bytes): {cause}"),
        message_id=stray_id,
        message_type=headers.get("ce_type", "unknown"),
        about=headers.get("ce_runid", "unknown"),
    )
    changes = {"headers": headers, "traceparent": headers.get("traceparent")}
    logger.error("%s: %s became a dead letter: %s", CONSUMER, letter.message_type, letter.cause)
    if content:
        await log.commit(Commit(artifacts=content))
    kept = letter.model_copy(update=changes)
    await log.append([kept], cause=stray_id, traceparent=kept.traceparent)


def _plain(text: str) -> str:
    """A header as the log can hold it: without null characters, and at most HEADER_CHARS long."""
    return text[:HEADER_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}")
