"""Finds stop strings in an answer without decoding all of it again for each token.

Only the last few tokens are decoded, together with a few before them, because a token's text may depend
on its neighbours. The text that they add is searched together with the end of the text so far. That
finds every stop string in the whole text. It may also find one that the whole text does not have,
because a tokenizer that falls back to bytes shows none of a run of bytes if one of them is wrong. So
each find is confirmed in the whole text, and the result is exactly that of decoding everything each
time.
"""

from collections.abc import Callable, Sequence

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The character that incomplete or invalid bytes decode to."""

MOST_PENDING = 64
"""Tokens that may wait for the end of a character, which has at most four bytes."""
KEPT_PENDING = 16


class StopStrings:
    """The stop strings of one answer. `decode`: ids to text, as the answer's text is made."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._kept = max(map(len, self._stops)) - 1
        self._whole = any(UNKNOWN in stop for stop in self._stops)
        self._begin = self._end = 0
        # The end of the text up to `begin`, up to `end`, and the text between.
        self._before = self._tail = self._base = ""

    def cut(self, ids: Sequence[int]) -> str | None:
        """The text of an answer before its first stop string; None if it has none. Must be called after
        each token."""
        if not self._whole and not self._shows(ids):
            return None
        text = self._decode(ids)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        return text[: min(found)] if found else None

    def _shows(self, ids: Sequence[int]) -> bool:
        """Whether the text of the new tokens shows a stop string, or this is uncertain."""
        text = self._decode(ids[self._begin :])
        if text.startswith(self._base):
            shown = [self._tail + text[len(self._base) :]]
        elif (
            UNKNOWN in text
        ):  # a run of bytes has become wrong; a decoder may strip the first space
            shown = [f"{self._before}{space}{text}" for space in ("", " ")]
        else:
            self._advance(ids, self._decode(ids))
            return True
        is_whole = len(text) > len(self._base) and not text.endswith(UNKNOWN)
        if is_whole or len(ids) - self._begin > MOST_PENDING:
            self._advance(ids, shown[0])
        return any(stop in part for stop in self._stops for part in shown)

    def _advance(self, ids: Sequence[int], text: str) -> None:
        """Mark `text` as searched, except for bytes that may still become a character."""
        settled = text.rstrip(UNKNOWN)
        begin = max(self._end, len(ids) - KEPT_PENDING)
        self._base = self._decode(ids[begin:]).rstrip(UNKNOWN)
        before = self._tail if begin == self._end else settled.removesuffix(self._base)
        self._before, self._tail = self._last(before), self._last(settled)
        self._begin, self._end = begin, len(ids)

    def _last(self, text: str) -> str:
        return text[max(0, len(text) - self._kept) :]
