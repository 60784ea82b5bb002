"""Whether a stop string has appeared in an answer, without decoding all of it again for each token.

Only the last few tokens are decoded, behind those before them (a token's text may depend on its
neighbours), and what they add is looked through together with the end of the text so far. That finds
every stop string that the whole text has. It may find one that the whole text has not: a tokenizer that
falls back to bytes shows none of a run of bytes if one of them is wrong. So what was found is looked up
in the whole text before it counts, and the answer is exactly that of decoding everything each time.
"""

from collections.abc import Callable, Sequence

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to that are no character, or none yet."""

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
        """The text of an answer before its first stop string; None where it has none. Called with each
        token that is added."""
        if not self._whole and not self._shows(ids):
            return None
        text = self._decode(ids)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        return text[: min(found)] if found else None

    def _shows(self, ids: Sequence[int]) -> bool:
        """Whether what the new tokens add shows a stop string, or cannot be told."""
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
        """`text` has been looked through, but for what may still become a character."""
        settled = text.rstrip(UNKNOWN)
        begin = max(self._end, len(ids) - KEPT_PENDING)
        self._base = self._decode(ids[begin:]).rstrip(UNKNOWN)
        before = self._tail if begin == self._end else settled.removesuffix(self._base)
        self._before, self._tail = self._last(before), self._last(settled)
        self._begin, self._end = begin, len(ids)

    def _last(self, text: str) -> str:
        return text[max(0, len(text) - self._kept) :]
