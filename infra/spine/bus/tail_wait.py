"""Waiting at the end of the log until there may be more of it."""

import asyncio
import time

from infra.spine.ports.event_log import Cursor, LogTail
from infra.spine.postgres.notify import Wakeup

SLOW_POLL_S = 5.0
"""How often the log is read without a wake-up. A lost wake-up delays events by this much."""

SHORTEST_NAP_S = 0.001
LONGEST_NAP_S = 0.05
NAP = 0.25
"""The next nap, as a part of the time for which events have been hidden. A wait is at most this
part longer than necessary."""


class TailWait:
    """Waits for the log to grow.

    An event may be committed and still lie above the horizon, because an older transaction is open. No
    wake-up is sent when that transaction ends. So while events are hidden, the log is read again soon,
    at growing intervals, because waiting for a wake-up would last until the next slow poll.
    """

    def __init__(self, log: LogTail, wakeup: Wakeup) -> None:
        self._log = log
        self._wakeup = wakeup
        self._at = Cursor()
        self._since = 0.0

    def begin_read(self) -> None:
        """Forget wake-ups until now: the read that follows answers them."""
        self._wakeup.clear()

    @property
    def has_wakeup(self) -> bool:
        """Whether a wake-up has come since `begin_read`."""
        return self._wakeup.is_set

    async def wait(self, after: Cursor, *, within_s: float = SLOW_POLL_S) -> None:
        """Wait until there may be events after `after`, where there were none. At most `within_s`."""
        if not await self._log.has_events_after(after):
            self._at = Cursor()
            await self._wakeup.wait(within_s)
            return
        if after != self._at:
            self._at, self._since = after, time.monotonic()
        hidden_s = time.monotonic() - self._since
        await asyncio.sleep(min(LONGEST_NAP_S, max(SHORTEST_NAP_S, NAP * hidden_s)))
