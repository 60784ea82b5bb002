"""A connection that knows PostgreSQL's own types from earlier connections of this process.

asyncpg asks each new connection how values of an array's type are written, by a query that takes the
server 9 ms of CPU time. The answer is the same on all connections for PostgreSQL's own types, whose
numbers never change. Types that somebody created differ between databases, so they are asked for.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import asyncpg

FIRST_OTHER = 10_000
"""The first number of a type that PostgreSQL's sources do not assign by hand
(https://www.postgresql.org/docs/current/system-catalog-initial-data.html)."""

_known: dict[tuple[int, frozenset[int]], Any] = {}
"""Major version of the server, numbers of types -> the server's description of them."""

NO_STATEMENT = SimpleNamespace(name="none")
"""Stands for the statement that asked. asyncpg prepares its own again if that had no name."""


class KnownTypes(asyncpg.Connection):  # type: ignore[misc]  # asyncpg ships no types
    """A connection of asyncpg that asks for a type only if no earlier one has."""

    async def _introspect_types(self, typeoids: Sequence[int], timeout: float | None) -> Any:
        """The description of these types, and the statement that asked for it."""
        if max(typeoids) >= FIRST_OTHER:
            return await super()._introspect_types(typeoids, timeout)
        key = (self.get_server_version().major, frozenset(typeoids))
        if key in _known:
            return _known[key], NO_STATEMENT
        answer, statement = await super()._introspect_types(typeoids, timeout)
        _known[key] = answer
        return answer, statement
