"""Replaces the values of secrets in text by `***NAME***`.

A value is found as it is, line by line if it has several lines, and in the forms that programs usually
print: base64 (also inside of a longer encoded text), hex, URL-, JSON- and HTML-escaped, and as Python
shows it. Other transformations, for example reversing or encrypting the value, are not found.

Everything that any form covers is replaced, also where two values overlap. A mask is longer than
nothing, so a masked text may be longer than the text.
"""

import base64
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote, quote_plus

SHORTEST = 8
"""Characters of the shortest form that is looked for."""

FRAGMENT = 12
"""A part of a form with at least this many characters is masked in texts that may have been cut."""

LONG, STRIDE = 1024, 8
"""In a form that is longer than LONG, only the parts that begin at every eighth character are looked
for, because all of them would take a second to prepare."""

Span = tuple[int, int, str]
"""Where something to mask begins and ends, and the name of its secret."""


def mask_of(name: str) -> str:
    """Return the text that takes the place of the secret `name`."""
    return f"***{name}***"


class Masks:
    """The masks of some secrets, by their names."""

    def __init__(self, values: Mapping[str, str]) -> None:
        forms = {form: name for name, value in values.items() for form in forms_of(value)}
        self._forms = sorted(forms.items(), key=lambda item: (-len(item[0]), item[0]))
        self._fragments: dict[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self._forms)

    def __repr__(self) -> str:
        return f"Masks({len(self._forms)} forms)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Masks) and self._forms == other._forms

    def __hash__(self) -> int:
        return hash(tuple(self._forms))

    @property
    def longest(self) -> int:
        """Characters of the longest form."""
        return len(self._forms[0][0]) if self._forms else 0

    def text(self, text: str) -> str:
        """Return `text` with every form of every secret replaced."""
        spans = self._spans(text)
        return _replace(text, spans) if spans else text

    def data(self, data: bytes) -> bytes:
        """Return bytes with every form of every secret replaced, as `text` does."""
        text = data.decode(errors="surrogateescape")
        masked = self.text(text)
        return data if masked is text else masked.encode(errors="surrogateescape")

    def cut_text(self, text: str) -> str:
        """Return a text with also the parts of forms replaced, because something may have cut it: a part
        of at least FRAGMENT characters."""
        spans = self._spans(text)
        if self._forms:
            spans += self._fragment_spans(text)
        return _replace(text, spans) if spans else text

    def stream(self) -> "MaskedStream":
        """Return a masked stream, for a text that arrives in pieces."""
        return MaskedStream(self)

    def _spans(self, text: str) -> list[Span]:
        found: list[Span] = []
        for form, name in self._forms:
            place = text.find(form)
            while place >= 0:
                found.append((place, place + len(form), name))
                place = text.find(form, place + 1)
        return found

    def _fragment_spans(self, text: str) -> Iterator[Span]:
        if self._fragments is None:
            self._fragments = {
                form[first : first + FRAGMENT]: name
                for form, name in self._forms
                for first in range(0, len(form) - FRAGMENT + 1, 1 if len(form) <= LONG else STRIDE)
            }
        for place in range(len(text) - FRAGMENT + 1):
            name = self._fragments.get(text[place : place + FRAGMENT])
            if name is not None:
                yield (place, place + FRAGMENT, name)


NO_MASKS = Masks({})


class MaskedStream:
    """Masks a text that arrives in pieces, also where a value is split between them. `feed` returns what
    can be passed on, and `finish` the rest."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self._waiting = ""

    def feed(self, piece: str) -> str:
        """Take the next piece, and return the text in which nothing can begin any more."""
        self._waiting += piece
        spans = merge_spans(self._masks._spans(self._waiting))
        end = max(0, len(self._waiting) - max(0, self._masks.longest - 1))
        for first, last, _ in spans:
            if first < end < last:
                end = first
        safe, self._waiting = self._waiting[:end], self._waiting[end:]
        return self._masks.text(safe)

    def finish(self) -> str:
        """Return the text that was kept back."""
        rest, self._waiting = self._waiting, ""
        return self._masks.text(rest)


def forms_of(value: str) -> frozenset[str]:
    """Return all forms in which a value is looked for."""
    lines = [line.strip() for line in value.splitlines()]
    whole = {value, value.strip()}
    found = {form for part in {*whole, *lines} if part for form in _escaped_forms(part)}
    found |= {form for part in whole if part for form in _encoded_forms(part)}
    return frozenset(form for form in found if len(form) >= SHORTEST)


def _escaped_forms(value: str) -> Iterator[str]:
    yield value
    for quoted in (quote(value, safe=""), quote(value), quote_plus(value)):
        yield quoted
        yield _lower_escapes(quoted)
    for ascii_only in (True, False):
        escaped = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
        yield escaped
        yield json.dumps(escaped, ensure_ascii=ascii_only)[1:-1]
    yield repr(value)[1:-1]
    yield repr(value.encode(errors="surrogatepass"))[2:-1]
    yield html.escape(value)
    yield html.escape(value, quote=False)


def _encoded_forms(value: str) -> Iterator[str]:
    data = value.encode(errors="surrogatepass")
    yield data.hex()
    yield data.hex().upper()
    for plain in (data, data + b"\n"):
        for encoded in (base64.b64encode(plain), base64.urlsafe_b64encode(plain)):
            yield encoded.decode()
            yield encoded.decode().rstrip("=")
    for offset in range(3):
        yield from _inner_base64(data, offset)


def _inner_base64(data: bytes, offset: int) -> Iterator[str]:
    """The base64 characters that depend on `data` alone, `offset` bytes after a multiple of three."""
    begin = (0, 2, 3)[offset]
    remaining = (offset + len(data)) % 3
    for encoded in (
        base64.b64encode(bytes(offset) + data),
        base64.urlsafe_b64encode(bytes(offset) + data),
    ):
        text = encoded.decode().rstrip("=")
        yield text[begin:] if remaining == 0 else text[begin:-1]


def _lower_escapes(quoted: str) -> str:
    """`%2F` as some programs write it: `%2f`."""
    first, *rest = quoted.split("%")
    return "%".join([first, *(part[:2].lower() + part[2:] for part in rest)])


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans without overlaps, in order. Spans that overlap become one, with the name of the
    longest."""
    merged: list[tuple[int, int, str, int]] = []
    for first, last, name in sorted(spans):
        size = last - first
        if merged and first < merged[-1][1]:
            begin, end, held, longest = merged[-1]
            merged[-1] = (
                (begin, max(end, last), name, size)
                if size > longest
                else (begin, max(end, last), held, longest)
            )
        else:
            merged.append((first, last, name, size))
    return [(first, last, name) for first, last, name, _ in merged]


def _replace(text: str, spans: Sequence[Span]) -> str:
    pieces, end = [], 0
    for first, last, name in merge_spans(spans):
        pieces += [text[end:first], mask_of(name)]
        end = last
    return "".join([*pieces, text[end:]])
