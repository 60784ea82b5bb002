"""The clock port, with the machine's clock, one that tests move by hand, and the time of the log."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Tells the time, and waits."""

    def now(self) -> datetime:
        """The time for people to read. It may jump."""
        ...

    def elapsed_s(self) -> float:
        """Seconds since some moment. They only ever grow, so a duration is a difference of two."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after this many seconds of this clock."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def elapsed_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """Stands still until `advance` moves it; a sleep moves it too."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start

    def now(self) -> datetime:
        return self._now

    def elapsed_s(self) -> float:
        return self._now.timestamp()

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


class LogTime:
    """The time by the clock that stamps events: the last time that was observed there, plus the seconds
    that have passed since. These are counted by a clock that only grows, so a wall clock that jumps, or
    two that differ, do not change it."""

    def __init__(self, clock: Clock) -> None:
        """Before the first `observe`, it is the time of `clock`."""
        self._clock = clock
        self.observe(clock.now())

    def observe(self, now: datetime) -> None:
        """The clock that stamps events shows `now`."""
        self._last, self._at_s = now, self._clock.elapsed_s()

    def now(self) -> datetime:
        return self._last + timedelta(seconds=self._clock.elapsed_s() - self._at_s)
