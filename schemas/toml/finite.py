"""Finds `inf` and `nan` in a TOML file, with the key and the line of each.

TOML has such numbers, but JSON does not, and no key takes one. The parser of the standard library does
not say where a value is, so each place that looks like one is parsed again with 0 in its place.
"""

import math
import re
import tomllib
from collections.abc import Iterator
from itertools import islice

from schemas.errors import Issue

NUMBER = re.compile(
    r"(?<![\w.+-])[+-]?(?:inf|nan|[0-9][0-9_]*(?:\.[0-9_]+)?(?:[eE][+-]?[0-9_]+)?)(?![\w.])"
)
MOST_PLACES = 50
"""The most places that are parsed again. Values at later ones are named without their line."""


def non_finite_issues(text: str, document: object) -> Iterator[Issue]:
    """One issue for each number of a parsed file that is not finite, in the order of the document."""
    values = dict(_non_finite("", document))
    if not values:
        return
    lines = _lines(text, set(values))
    for key, value in values.items():
        where = f" in line {lines[key]}" if key in lines else ""
        yield Issue(
            key, f"must be a finite number, got {value}{where}; write a number, or remove it"
        )


def _non_finite(key: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _non_finite(f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _non_finite(f"{key}[{index}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, value


def _lines(text: str, keys: set[str]) -> dict[str, int]:
    """The line of each key, from 1."""
    found: dict[str, int] = {}
    places = (one for one in NUMBER.finditer(text) if _is_infinite(one[0]))
    for place in islice(places, MOST_PLACES):
        try:
            changed = tomllib.loads(f"{text[: place.start()]}0{text[place.end() :]}")
        except (ValueError, RecursionError):
            continue  # the place is inside of something else, for example of a key
        for key in keys - {key for key, _ in _non_finite("", changed)}:
            found[key] = text.count("\n", 0, place.start()) + 1
    return found


def _is_infinite(written: str) -> bool:
    try:
        return not math.isfinite(float(written.replace("_", "")))
    except ValueError:
        return False
