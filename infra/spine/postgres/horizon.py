"""Chooses the horizon up to which the log is read. Below a horizon no transaction can still commit an
event.

The server's horizon costs nothing, but it covers all databases of the server, so a transaction that
writes in another database would hold our log back. The horizon of our own writers leaves those out. It
is as safe (`own_horizon` in `sql/schema.sql` says why) and never lower, but it reads the list of all
sessions. So it is used only once the server's horizon has hidden an event for a while.
"""

import time
from collections.abc import Callable

from infra.spine.ports.event_log import Cursor

HIDDEN_S = 0.3
"""How long an event is hidden before the horizon of our own writers is used. It is longer than a commit
of ours that waits for a slow disk should take."""

OWN_S = 30.0
"""How long it is then used: the transaction in another database may stay open for hours."""

MOST_CURSORS = 32


class Horizon:
    """Chooses between the two horizons, for all readers of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hidden: dict[Cursor, float] = {}
        self._own_until = 0.0

    @property
    def below(self) -> str:
        """Return the condition on an event, as the name of a part of `sql/event_log.sql`."""
        return "below_own_horizon" if self._clock() < self._own_until else "below_horizon"

    def note(self, after: Cursor, *, hidden: bool) -> None:
        """Note whether a reader that has read up to `after` found a committed event above it that its
        horizon hid."""
        if not hidden:
            self._hidden.pop(after, None)
            return
        if len(self._hidden) > MOST_CURSORS:
            self._hidden.clear()  # readers that have moved on
        if self._clock() - self._hidden.setdefault(after, self._clock()) >= HIDDEN_S:
            self._own_until = self._clock() + OWN_S
