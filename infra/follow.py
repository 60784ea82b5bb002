"""Waiting at the end of the log until there may be more of it."""

import asyncio

from infra.notify import Wakeup
from infra.ports import Cursor, EventLog

SLOW_POLL_S = 5.0
"""How often the log is looked at when nothing wakes us; a lost wake-up costs this much."""

FIRST_NAP_S = 0.001
LONGEST_NAP_S = 0.05


class Patience:
    """Waits for the log to grow.

    An event may be committed and still lie above the horizon, because another transaction is under
    way; nobody says when that one ends. So while something is hidden the log is looked at again soon,
    at growing intervals: to wait for the next wake-up would cost a slow poll.
    """

    def __init__(self, log: EventLog, wakeup: Wakeup) -> None:
        self._log = log
        self._wakeup = wakeup
        self._at = Cursor()
        self._nap_s = FIRST_NAP_S

    async def wait(self, after: Cursor) -> None:
        """Return when it is worth reading the log after `after` again, where nothing was just now."""
        if after != self._at:
            self._at, self._nap_s = after, FIRST_NAP_S
        if not await self._log.ahead(after):
            await self._wakeup.wait(SLOW_POLL_S)
            return
        await asyncio.sleep(self._nap_s)
        self._nap_s = min(LONGEST_NAP_S, self._nap_s * 2)
