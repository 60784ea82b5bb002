"""Addresses that send too many requests without a valid API key are turned away for a while: their
connections are closed as soon as they are accepted.

To refuse a request costs a connection, a parser and an answer, and to turn one away a tenth of that.
So a flood takes a part of one core, and those who are served do not wait behind it.
"""

import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

REFUSED_PER_S, REFUSED_AT_ONCE = 20.0, 100.0
"""How many refused requests of one address are answered per second, and how many at once after a
pause."""

ALL_PER_S, ALL_AT_ONCE = 400.0, 1000.0
"""How many refused requests of all addresses are answered before every address that had one within
CROWD_S is turned away."""

CROWD_S = 10.0
WELCOME_S = 60.0
"""How long an address is served in any case after a request of it had a valid API key. Behind one
address there may be many people."""

MOST_ADDRESSES = 4096
"""How many addresses are remembered. The one that was seen least recently is forgotten first."""


@dataclass(slots=True)
class FallingCount:
    """A count that falls by `per_s` each second."""

    per_s: float
    level: float = 0.0
    at: float = float("-inf")

    def now(self, time_s: float) -> float:
        if self.level:
            self.level = max(0.0, self.level - self.per_s * (time_s - self.at))
        self.at = time_s
        return self.level


@dataclass(slots=True)
class _Address:
    refused: FallingCount
    refused_at: float = float("-inf")
    welcome_until: float = float("-inf")


class FailedAuthThrottle:
    """Counts the refused requests of addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._all = FallingCount(ALL_PER_S)

    def refuse(self, address: str) -> None:
        """Count a refused request of an address."""
        now, seen = self._clock(), self._see(address)
        seen.refused.level = min(seen.refused.now(now) + 1, 2 * REFUSED_AT_ONCE)
        seen.refused_at = now
        self._all.level = min(self._all.now(now) + 1, 2 * ALL_AT_ONCE)

    def welcome(self, address: str) -> None:
        """Note that a request of an address had a valid API key."""
        self._see(address).welcome_until = self._clock() + WELCOME_S

    def must_leave(self, address: str) -> bool:
        """Whether a new connection of an address is turned away."""
        seen = self._addresses.get(network_of(address))
        if seen is None:
            return False
        now = self._clock()
        if seen.welcome_until > now:
            return False
        is_crowded = self._all.now(now) > ALL_AT_ONCE and now - seen.refused_at < CROWD_S
        return is_crowded or seen.refused.now(now) > REFUSED_AT_ONCE

    def _see(self, address: str) -> _Address:
        network = network_of(address)
        seen = self._addresses.get(network)
        if seen is None:
            seen = self._addresses[network] = _Address(FallingCount(REFUSED_PER_S))
            if len(self._addresses) > MOST_ADDRESSES:
                self._addresses.popitem(last=False)
        else:
            self._addresses.move_to_end(network)
        return seen


def network_of(address: str) -> str:
    """An address, or the /64 network of one of IPv6, because one sender has a whole network."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return packed[:8].hex()
