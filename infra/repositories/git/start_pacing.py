"""Spreads the beginnings of work, so that a burst of requests for it leaves the processor to others."""

import asyncio


class StartPacing:
    """Lets `burst` calls begin at once, and after that `per_s` in a second, in their order (the generic
    cell rate algorithm)."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / per_s
        self._ahead_s = (burst - 1) / per_s
        self._due = 0.0

    async def wait(self) -> None:
        """Wait until this call may begin."""
        now = asyncio.get_running_loop().time()
        due = max(self._due, now)
        self._due = due + self._interval_s
        if (left := due - self._ahead_s - now) > 0:
            await asyncio.sleep(left)
