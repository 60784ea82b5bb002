"""Limits on requests that need no API key: for each sender, and for all of them together. They hold for
one process."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from infra.http.failed_auth_throttle import FallingCount

MOST_SENDERS = 4096
"""How many senders are remembered. The one that was seen least recently is forgotten first."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many requests may come in a minute, and as many at once after a pause."""

    per_minute: float

    @property
    def per_s(self) -> float:
        return self.per_minute / 60


class RequestLimits:
    """Counts requests of senders, which any text names."""

    def __init__(
        self,
        *,
        each: Rate,
        together: Rate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `together` there is no limit for all senders."""
        self._each, self._together, self._clock = each, together, clock
        self._senders: OrderedDict[str, FallingCount] = OrderedDict()
        self._all = FallingCount(together.per_s if together else 0.0)

    def wait_s(self, sender: str) -> float:
        """How many seconds a sender has to wait before its next request; 0 when it may send one."""
        now = self._clock()
        waits = [_excess(self._all, self._together, now)] if self._together else [0.0]
        if (pace := self._senders.get(sender)) is not None:
            waits.append(_excess(pace, self._each, now))
        return max(waits)

    def count(self, sender: str) -> None:
        """Count a request of a sender."""
        now = self._clock()
        pace = self._senders.get(sender)
        if pace is None:
            pace = self._senders[sender] = FallingCount(self._each.per_s)
            if len(self._senders) > MOST_SENDERS:
                self._senders.popitem(last=False)
        else:
            self._senders.move_to_end(sender)
        for counted in (pace, self._all):
            counted.level = counted.now(now) + 1

    def take_s(self, sender: str) -> float:
        """Count a request of a sender if it may send one, and return 0; or else return how many seconds
        it has to wait."""
        wait_s = self.wait_s(sender)
        if not wait_s:
            self.count(sender)
        return wait_s

    def give_back(self, sender: str) -> None:
        """Take a request of a sender, which was counted before, out of the count."""
        now = self._clock()
        for counted in (self._senders.get(sender), self._all):
            if counted is not None:
                counted.level = max(0.0, counted.now(now) - 1)


def _excess(pace: FallingCount, rate: Rate, now: float) -> float:
    over = pace.now(now) + 1 - rate.per_minute
    return max(0.0, over / rate.per_s)
