"""The part of an error message that enters an event. Events are small, and errors of user code are not.

The samples of a group share one event, so their messages share the space in it. Characters that break a
terminal or a database (control characters, lone surrogates) do not enter the log.
"""

import itertools

from schemas.text import plain

ROOM_BYTES = 6000
"""Bytes of message text that all samples of one event may take together, as JSON."""

LONGEST_BYTES = 400


def excerpt(message: str, *, num_samples: int = 1, longest: int = LONGEST_BYTES) -> str:
    """Return the part of `message` that fits into an event about `num_samples` samples, with printable
    characters only and at most `longest` bytes."""
    limit = max(24, min(longest, ROOM_BYTES // num_samples))
    text = plain(message[: 2 * limit].strip())
    if sum(map(_size, text)) <= limit:
        return text
    ends = itertools.accumulate(map(_size, text))
    return text[: sum(end <= limit - 1 for end in ends)] + "…"


def _size(character: str) -> int:
    """Return how many bytes a printable character takes as JSON."""
    return 2 if character in '"\\\n\t' else len(character.encode())
