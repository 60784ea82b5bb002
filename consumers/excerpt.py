"""How much of an error message an event takes: events are small, what user code raises is not.

A group's samples share one event, so their messages share one room. What a terminal or a database
would stumble over (control characters, lone surrogates) does not enter the log.
"""

from schemas.plain import plain

ROOM_CHARS = 6000
"""Characters of message text that all samples of one event may take together."""

LONGEST_CHARS = 400


def excerpt(message: str, *, num_samples: int = 1) -> str:
    """The part of `message` that an event about `num_samples` samples can carry, printable."""
    limit = max(24, min(LONGEST_CHARS, ROOM_CHARS // num_samples))
    text = plain(message[: 2 * limit].strip())
    return text if len(text) <= limit else text[: limit - 1] + "…"
