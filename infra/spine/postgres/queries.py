"""Named queries in `.sql` files beside the modules that use them, read once when those are imported.

`-- name: tail` begins a statement, and `-- part: event_columns` begins a part of one. Each ends where
the next begins. Other comments are for the reader and are not sent to the server. Braces may hold

    {event_columns}          the part of that name
    {end: below | upto}      one of these parts, which the caller chooses: `variant("tail", end="upto")`
    {table: ...}             the caller's own text: `variant("insert_rows", table="runs")`

So every statement that can reach the database is in the file, except for the text that `...` marks. That
text is never a value, because values are always $1, $2.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]

HEADER = re.compile(r"^-- (name|part): (\w+)$", re.M)
COMMENT = re.compile(r"^\s*--.*\n?", re.M)
SLOT = re.compile(r"\{(\w+)(?:: ([\w .|]+))?\}")


class BadQueries(Exception):
    """A file of queries cannot be read, or it does not have a query."""


class Queries:
    """The queries of one file."""

    def __init__(self, file: str, text: str) -> None:
        """Parse the text. Raises BadQueries when a name is missing, defined twice, or not a part."""
        self._file = file
        self._parts: dict[str, str] = {}
        self._statements: dict[str, str] = {}
        self._variants: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}
        before, *blocks = HEADER.split(text)
        if COMMENT.sub("", before).strip():
            raise BadQueries(f"{file} has text before the first name: put a name above it")
        for kind, name, body in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
            if name in self._parts or name in self._statements:
                raise BadQueries(f"{file} has {name} twice: rename one")
            if not (statement := COMMENT.sub("", body).strip()):
                raise BadQueries(f"{file} has nothing below {name}: write it, or drop the name")
            (self._parts if kind == "part" else self._statements)[name] = statement
        for found in (self._parts, self._statements):
            for name, statement in found.items():
                found[name] = self._with_parts(name, statement)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._statements)

    def __getitem__(self, name: str) -> str:
        """Return a statement. Raises BadQueries when it does not exist, or when it has variants."""
        return self.variant(name)

    def variant(self, name: str, **choices: str) -> str:
        """Return a statement with these choices. Raises BadQueries when the file does not offer one of
        them, or when one is missing."""
        key = (name, tuple(sorted(choices.items())))
        if key not in self._variants:
            if name not in self._statements:
                raise BadQueries(f"{self._file} has no query {name!r}: add it")
            self._variants[key] = self._choose(name, choices)
        return self._variants[key]

    def _with_parts(self, name: str, statement: str) -> str:
        """Replace the slots that are parts, and check those that are choices."""

        def fill(slot: re.Match[str]) -> str:
            wanted, offered = slot[1], slot[2]
            if offered is None:
                return SLOT.sub(fill, self._part(name, wanted))
            if offered != "...":
                for option in offered.split(" | "):
                    self._part(name, option)
            return slot[0]

        return SLOT.sub(fill, statement)

    def _part(self, name: str, part: str) -> str:
        if part not in self._parts:
            raise BadQueries(f"{self._file}: {name} names {part!r}, which is not a part of it")
        return self._parts[part]

    def _choose(self, name: str, choices: Mapping[str, str]) -> str:
        made: set[str] = set()

        def fill(slot: re.Match[str]) -> str:
            what, offered = slot[1], slot[2]
            choice = choices.get(what)
            if choice is None or (offered != "..." and choice not in offered.split(" | ")):
                raise BadQueries(f"query {name!r} needs {what} as one of {offered}, not {choice!r}")
            made.add(what)
            return choice if offered == "..." else self._parts[choice]

        statement = SLOT.sub(fill, self._statements[name])
        if unknown := sorted(set(choices) - made):
            raise BadQueries(f"query {name!r} has no {', '.join(unknown)} to choose")
        return statement


@cache
def queries(file: str) -> Queries:
    """Read a file of queries, named from the root of the project. Raises BadQueries."""
    path = ROOT / file
    if not path.is_file():
        raise BadQueries(f"there is no {path}: write it, or correct the name")
    return Queries(file, path.read_text())
