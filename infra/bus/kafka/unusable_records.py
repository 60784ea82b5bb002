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

from infra.ports.event_log import Commit, EventStore
from infra.runtime.dead_letters import letter_of
from schemas.envelope import BadEvent
from schemas.ids import HEADRACE, derive_id

logger = logging.getLogger(__name__)

CONSUMER = "kafka"
"""The consumer in the name of which unreadable records are dead letters."""

HEADER_CHARS = 256
MOST_HEADERS = 32
KEPT_BYTES = 1 << 20
"""As large as a broker takes records by default."""


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


async def keep(log: EventStore, stray: Stray, cause: str) -> None:
    """Make it a dead letter. Doing it again changes nothing. Of a record larger than any event is, the
    beginning is kept; the broker has the rest for as long as it keeps records."""
    headers = {
        _plain(name): _plain(text) for name, text in list(stray.headers.items())[:MOST_HEADERS]
    }
    stray_id = derive_id(HEADRACE, f"stray/{stray.fingerprint}")
    letter, content = letter_of(
        CONSUMER,
        stray.value[:KEPT_BYTES],
        BadEvent(f"{stray.place} ({len(stray.value)} bytes): {cause}"),
        message_id=stray_id,
        message_type=headers.get("ce_type", "unknown"),
        about=headers.get("ce_runid", "unknown"),
    )
    changes = {"headers": headers, "traceparent": headers.get("traceparent")}
    logger.error("%s: %s is a dead letter: %s", CONSUMER, letter.message_type, letter.cause)
    if content:
        await log.commit(Commit(artifacts=content))
    kept = letter.model_copy(update=changes)
    await log.append([kept], cause=stray_id, traceparent=kept.traceparent)


def _plain(text: str) -> str:
    """A header as the log can have it: no null character, and no longer than anybody would read."""
    return text[:HEADER_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}")
