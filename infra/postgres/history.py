"""Whether the database is still the one that was read before.

A server that was restored from a copy, or a replica that took over and lacks the last transactions, has
another history: its log ends below cursors that were read before, cached states are of a future that did
not happen, and the next events stand at places that others had. Connections do not survive such a
change, and a server that starts again says so, so each new connection is asked which server it leads to.
Whoever keeps something that was read says under which turn, and is refused once that one is over.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from infra.postgres.errors import DatabaseUnavailable

logger = logging.getLogger(__name__)

IDENTITY = (
    "select concat_ws('/', extract(epoch from pg_postmaster_start_time()),"
    " (select d.oid from pg_database d where d.datname = current_database()),"
    " to_regclass('events')::oid)"
)
"""A server process, a database in it, and its log: a restored one differs in one of them. An ordinary
restart does too; to start again from a watermark costs little."""

_AS_OF: ContextVar[int | None] = ContextVar("as_of", default=None)


class Turned(DatabaseUnavailable):
    """The database has another history than the one that was read: start again from what it says."""

    def __init__(self) -> None:
        super().__init__(
            "the database is another one than before, or was started again: read it again"
        )


class History:
    """The turns of one database's history, as the connections of a process see them."""

    def __init__(self) -> None:
        self.turns = 0
        self._known: str | None = None

    async def meet(self, connection: Any) -> None:
        """Ask a new connection which server it leads to."""
        found = await connection.fetchval(IDENTITY)
        if self._known is not None and found != self._known:
            self.turns += 1
            logger.warning("the database was started again, or is another one: cursors start again")
        self._known = found

    def check(self) -> None:
        """Raises Turned when this is asked `as_of` a turn that is over."""
        check(self.turns)


@contextmanager
def as_of(turn: int) -> Iterator[None]:
    """What is asked of the database inside is refused, with Turned, if its history has turned since."""
    token = _AS_OF.set(turn)
    try:
        yield
    finally:
        _AS_OF.reset(token)


def check(turns: int) -> None:
    """Raises Turned when the caller is bound to another turn than this one."""
    bound = _AS_OF.get()
    if bound is not None and bound != turns:
        raise Turned
