"""The workspaces of organisations, as the guard asks for them with each request of an API key that is
bound to an organisation.

An answer is never older than its question, so that a workspace which a request added is seen by the
next request in every control process. Questions that arrive while a query runs share the query after
it: a process has at most one query per organisation, whatever the number of requests. While the
database does not answer, what was read last stays valid for STALE_S.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from infra.spine.ports.clock import Clock
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from schemas.errors import TransientError

STALE_S = 5.0
MOST_KEPT = 1024
"""How many organisations a process remembers."""


@dataclass(slots=True)
class _Known:
    """An organisation as it is known, the query that runs, and the one that begins after it."""

    workspaces: frozenset[str] = frozenset()
    read_at: float = float("-inf")
    running: asyncio.Task[None] | None = None
    waiting: asyncio.Task[None] | None = field(default=None)


class RecentWorkspaces:
    """Finds the workspaces of organisations."""

    def __init__(self, read: Callable[[str], Awaitable[frozenset[str]]], clock: Clock) -> None:
        """`read` returns the workspaces (ids) of an organisation (id)."""
        self._read = read
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def workspaces_of(self, organisation: str) -> frozenset[str]:
        """The workspaces (ids) of an organisation (id) as they are now. Raises TransientError when the
        database has not answered for STALE_S."""
        known = self._known.pop(organisation, None) or _Known()
        self._known[organisation] = known
        while len(self._known) > MOST_KEPT:
            del self._known[next(iter(self._known))]
        await asyncio.shield(self._query_after_now(organisation, known))
        if self._clock.elapsed_s() - known.read_at >= STALE_S:
            raise TransientError(
                "the workspaces of your organisation cannot be read now; try again"
            )
        return known.workspaces

    def _query_after_now(self, organisation: str, known: _Known) -> asyncio.Task[None]:
        """A query that begins after this moment."""
        if known.running is None or known.running.done():
            known.running = asyncio.ensure_future(self._query(organisation, known))
            return known.running
        if known.waiting is None:
            known.waiting = asyncio.ensure_future(self._query_next(organisation, known))
        return known.waiting

    async def _query_next(self, organisation: str, known: _Known) -> None:
        if known.running is not None:
            await asyncio.wait([known.running])
        known.running, known.waiting = known.waiting, None
        await self._query(organisation, known)

    async def _query(self, organisation: str, known: _Known) -> None:
        began = self._clock.elapsed_s()
        try:
            known.workspaces, known.read_at = await self._read(organisation), began
        except UNAVAILABLE_ERRORS:
            return  # what was read last stays valid for a while
