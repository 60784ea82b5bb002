"""A rate with bursts: the token bucket."""

import asyncio


class TokenBucket:
    """Gives out `per_s` tokens a second, and up to `burst` at once after a pause. At most
    `most_waiting` callers may wait."""

    def __init__(self, *, per_s: float, burst: int, most_waiting: int = 1 << 16) -> None:
        self._interval = 1 / per_s
        self._burst_s = burst / per_s
        self._longest_s = most_waiting / per_s
        self._next = 0.0
        """When the next token is due if none was saved."""

    async def take(self) -> bool:
        """Take a token, in the order of the calls. Waits until there is one. Returns False at once when
        too many callers wait."""
        now = asyncio.get_running_loop().time()
        due = max(self._next, now - self._burst_s) + self._interval
        if due - now > self._longest_s:
            return False
        self._next = due
        if due > now:
            await asyncio.sleep(due - now)
        return True
