"""Reads a TOML file that is not trusted, from a repository or a form.

Everything that decides how much time and memory the parser takes is checked before anything is parsed.
What is returned has bounded nesting, so that code which recurses over it is safe.
"""

import re
import tomllib
from typing import Any

from schemas.errors import InvalidConfig
from schemas.toml.finite import non_finite_issues

MOST_BYTES = 64 * 1024
DEEPEST = 32
"""The deepest nesting of tables and lists that is read."""
KEY_PART = rb"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(
    rb"^[ \t]*+\[{0,2}+[ \t]*+(?:%s[ \t]*+\.[ \t]*+){%d}" % (KEY_PART, DEEPEST), re.MULTILINE
)
"""A dotted key at the start of a line that is nested too deeply. The parser keeps each of its
beginnings, and those of all keys below such a table. Nothing is tried in two ways, so that the search
takes linear time."""
MOST_DOTS = 500
"""The most dots in a line. The time to read a dotted key anywhere grows with the square of its parts."""
PARTS = (b".", b"[", b"{", b"=", b",")
MOST_PARTS = 500_000
"""The most characters of a file that begin a table, a list, a value, or a part of a key. The parser
takes up to 250 bytes for each."""


def read_untrusted_toml(content: bytes, path: str) -> dict[str, Any]:
    """Parse the file that a repository has at `path`. Raises InvalidConfig when it is too large, too
    deeply nested, or not valid TOML, or has a number that is not finite."""
    document = parse_bounded_toml(content, path, most_bytes=MOST_BYTES)
    if _has_long_number(document):
        raise InvalidConfig(f"{path} has a whole number of more than 64 bits; write a smaller one")
    for issue in non_finite_issues(content.decode(), document):
        raise InvalidConfig(f"{path}: {issue.key}: {issue.message}", issues=(issue,))
    return document


def parse_bounded_toml(content: bytes, path: str, *, most_bytes: int) -> dict[str, Any]:
    """Parse a TOML file in bounded time and memory. Raises InvalidConfig when it is too large, too
    deeply nested, or not valid TOML."""
    if len(content) > most_bytes:
        raise InvalidConfig(f"{path} has {len(content)} bytes; it may have at most {most_bytes}")
    if LONG_KEY.search(content) or any(
        line.count(b".") > MOST_DOTS for line in content.splitlines()
    ):
        raise _too_deep(path)
    if sum(map(content.count, PARTS)) > MOST_PARTS:
        raise InvalidConfig(f"{path} has more than {MOST_PARTS} keys, tables and lists; use fewer")
    try:
        document = tomllib.loads(content.decode())
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers that are too long
        shown = str(error)[:200]
        raise InvalidConfig(f"{path} is not valid TOML: {shown}; correct it there") from error
    if _depth_exceeds(document, DEEPEST):
        raise _too_deep(path)
    return document


def _too_deep(path: str) -> InvalidConfig:
    return InvalidConfig(f"{path} is nested more than {DEEPEST} levels deep; use fewer levels")


def _has_long_number(value: object) -> bool:
    """Whether a whole number is longer than those of TOML. Python reads it, and then cannot show it."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return any(_has_long_number(one) for one in inner)
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _depth_exceeds(value: object, most: int) -> bool:
    """Whether tables and lists are nested deeper than `most` levels. It does not recurse."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
