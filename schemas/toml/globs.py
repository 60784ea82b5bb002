"""Globs, which select branches, tags and files by their names.

A name has parts between slashes. Within a part, `*` matches any characters, `?` one character and
`[...]` one of several. A part that is `**` matches any number of parts, also none. A pattern that
begins with `!` excludes.

Patterns come from repositories that are not trusted, so the time of a match is bounded. Two stars never
multiply it: `fnmatch` matches the stars of a part with atomic groups, and `**` is matched by moving two
positions forwards.
"""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

LONGEST_GLOB = 200
CACHED = 4096
"""How many patterns are kept in the form in which they are matched."""
ACROSS = "**"


def glob_problem(pattern: str) -> str | None:
    """Why `pattern` is not a glob, as the end of a sentence, or None."""
    body = pattern.removeprefix("!")
    parts = body.split("/")
    if not body:
        return "must be a pattern, such as main or rollouts/**"
    if len(pattern) > LONGEST_GLOB:
        return f"must have at most {LONGEST_GLOB} characters"
    if not pattern.isprintable():
        return "must not hold control characters"
    if body.startswith(("refs/heads/", "refs/tags/")):
        return f"must be the short name of a branch or tag; write {body.split('/', 2)[2]}"
    if not parts[-1]:
        return "must not end with /; write /** for everything in a folder"
    if "" in parts:
        return "must not begin with / or have two slashes in a row"
    if any(ACROSS in part and part != ACROSS for part in parts):
        return "must have ** only alone between slashes, as in rollouts/**/*.py"
    return None


@dataclass(frozen=True, slots=True)
class Glob:
    """One pattern, ready to match. A part is None for `**`."""

    excludes: bool
    parts: tuple[re.Pattern[str] | None, ...]

    def matches(self, name: tuple[str, ...]) -> bool:
        """Whether the pattern matches the whole of a name, which is given in parts."""
        here, position = 0, 0
        star, resume = -1, 0
        while position < len(name):
            if here < len(self.parts) and (part := self.parts[here]) is None:
                star, resume = here, position
                here += 1
            elif here < len(self.parts) and part is not None and part.fullmatch(name[position]):
                here += 1
                position += 1
            elif star >= 0:
                resume += 1
                here, position = star + 1, resume
            else:
                return False
        return all(part is None for part in self.parts[here:])


@lru_cache(maxsize=CACHED)
def compile_glob(pattern: str) -> Glob:
    """Return a pattern in the form in which it is matched."""
    body = pattern.removeprefix("!")
    parts = tuple(
        None if part == ACROSS else re.compile(fnmatch.translate(part)) for part in body.split("/")
    )
    return Glob(excludes=pattern.startswith("!"), parts=parts)


def is_selected(name: str, patterns: Iterable[str]) -> bool:
    """Whether `patterns` select `name`: the last pattern that matches decides. If all patterns exclude,
    they select everything else."""
    globs = [compile_glob(pattern) for pattern in patterns]
    parts = tuple(name.split("/"))
    for glob in reversed(globs):
        if glob.matches(parts):
            return not glob.excludes
    return all(glob.excludes for glob in globs)
