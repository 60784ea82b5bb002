"""Which horizon the log is read by: no transaction below it can still commit an event.

The server's own costs nothing, but it covers all databases of the server: a transaction that writes in
another one would hold our log back. The horizon of our own writers leaves those out. It is as safe
(migration 0015 says why) and never lower, but it costs a look at all sessions, so it is read only once
the other one has hidden an event for a while.
"""

import time
from collections.abc import Callable

from infra.ports.event_log import Cursor

BELOW_HORIZON = "xid < pg_snapshot_xmin(pg_current_snapshot())"
BELOW_OWN_HORIZON = "xid < (select own_horizon(pg_current_snapshot()))"

HIDDEN_S = 0.3
"""An event is hidden for this long before the horizon of our own writers is read. A commit of ours that
waits for a slow disk should not be enough."""

OWN_S = 30.0
"""It is then read for this long: the foreign transaction may stay open for hours."""

MOST_CURSORS = 32


class Horizon:
    """The choice between the two, for all readers of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hidden: dict[Cursor, float] = {}
        self._own_until = 0.0

    @property
    def below(self) -> str:
        """The condition on an event."""
        return BELOW_OWN_HORIZON if self._clock() < self._own_until else BELOW_HORIZON

    def seen(self, after: Cursor, *, hidden: bool) -> None:
        """A reader that has read up to `after` found a committed event above it, or none."""
        if not hidden:
            self._hidden.pop(after, None)
            return
        if len(self._hidden) > MOST_CURSORS:
            self._hidden.clear()  # readers that have moved on
        if self._clock() - self._hidden.setdefault(after, self._clock()) >= HIDDEN_S:
            self._own_until = self._clock() + OWN_S
