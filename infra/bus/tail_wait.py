"""Waiting at the end of the log until there may be more of it."""

import asyncio
import time

from infra.ports.event_log import Cursor, LogTail
from infra.postgres.notify import Wakeup

SLOW_POLL_S = 5.0
"""How often the log is looked at when nothing wakes us; a lost wake-up costs this much."""

SHORTEST_NAP_S = 0.001
LONGEST_NAP_S = 0.05
NAP = 0.25
"""Of the time that something has been hidden for: so much longer than needed it waits at most."""


class Patience:
    """Waits for the log to grow.

    An event may be committed and still lie above the horizon, because another transaction is under
    way; nobody says when that one ends. So while something is hidden the log is looked at again soon,
    at growing intervals: to wait for the next wake-up would cost a slow poll.
    """

    def __init__(self, log: LogTail, wakeup: Wakeup) -> None:
        self._log = log
        self._wakeup = wakeup
        self._at = Cursor()
        self._since = 0.0

    def look(self) -> None:
        """The log is about to be read: that answers whatever was said until now."""
        self._wakeup.clear()

    @property
    def called(self) -> bool:
        """Whether somebody has said since the last look that there is more."""
        return self._wakeup.called

    async def wait(self, after: Cursor, *, within_s: float = SLOW_POLL_S) -> None:
        """Return when it is worth reading the log after `after` again, where nothing was just now; at
        the latest after `within_s`."""
        if not await self._log.has_events_after(after):
            self._at = Cursor()
            await self._wakeup.wait(within_s)
            return
        if after != self._at:
            self._at, self._since = after, time.monotonic()
        hidden_s = time.monotonic() - self._since
        await asyncio.sleep(min(LONGEST_NAP_S, max(SHORTEST_NAP_S, NAP * hidden_s)))
