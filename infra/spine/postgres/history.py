"""Detects that the database is not the one that was read before.

A server that was restored from a copy has another history, and so has a replica that took over without
the last transactions. Its log ends below cursors that were read before, cached states contain events
that it does not have, and new events get versions that other events had. Connections do not survive such
a change, and a restarted server can be recognized. So each new connection is asked which server it leads
to. The history epoch counts the changes. Code that keeps something that it read names the epoch in which
it read it, and its calls raise HistoryChanged once another epoch has begun.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from infra.spine.postgres.errors import DatabaseUnavailable

logger = logging.getLogger(__name__)

IDENTITY = (
    "select concat_ws('/', extract(epoch from pg_postmaster_start_time()),"
    " (select d.oid from pg_database d where d.datname = current_database()),"
    " to_regclass('events')::oid)"
)
"""Identifies a server process, a database in it, and its log. A restored database differs in one of
them. An ordinary restart also counts as a change, which is fine because starting again from a watermark
costs little."""

_AS_OF: ContextVar[int | None] = ContextVar("as_of", default=None)


class HistoryChanged(DatabaseUnavailable):
    """The database has another history than the one that was read. Read everything again."""

    def __init__(self) -> None:
        super().__init__(
            "the database is another one than before, or was started again: read it again"
        )


class History:
    """The epoch of one database's history, as the connections of a process see it."""

    def __init__(self) -> None:
        self.history_epoch = 0
        self._known: str | None = None

    async def meet(self, connection: Any) -> None:
        """Ask a new connection which server it leads to, and begin a new epoch if the server changed."""
        found = await connection.fetchval(IDENTITY)
        if self._known is not None and found != self._known:
            self.history_epoch += 1
            logger.warning("the database was started again, or is another one: cursors start again")
        self._known = found

    def check(self) -> None:
        """Raise HistoryChanged when the caller runs inside `as_of` with an epoch that is over."""
        check(self.history_epoch)


@contextmanager
def as_of(history_epoch: int) -> Iterator[None]:
    """Bind the calls inside the block to an epoch. They raise HistoryChanged once the database's history
    has another one."""
    token = _AS_OF.set(history_epoch)
    try:
        yield
    finally:
        _AS_OF.reset(token)


def check(history_epoch: int) -> None:
    """Raise HistoryChanged when the caller is bound to another epoch than `history_epoch`."""
    bound = _AS_OF.get()
    if bound is not None and bound != history_epoch:
        raise HistoryChanged
