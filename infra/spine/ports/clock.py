"""The clock port, the machine's clock, a clock that tests move by hand, and the time of the log."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Tells the time, and waits."""

    def now(self) -> datetime:
        """Return the wall-clock time, for people. It may jump."""
        ...

    def elapsed_s(self) -> float:
        """Return the seconds since some fixed moment. The value never decreases, so the difference of
        two values is a duration."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for this many seconds of this clock."""
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
    """A clock that only moves when `advance` or `sleep` moves it."""

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
    that have passed since. A monotonic clock counts these seconds, so the time is right even when this
    machine's wall clock jumps or differs from the one that stamps events."""

    def __init__(self, clock: Clock) -> None:
        """Until the first `observe`, the time is that of `clock`."""
        self._clock = clock
        self.observe(clock.now())

    def observe(self, now: datetime) -> None:
        """Record that the clock that stamps events shows `now`."""
        self._last, self._at_s = now, self._clock.elapsed_s()

    def now(self) -> datetime:
        return self._last + timedelta(seconds=self._clock.elapsed_s() - self._at_s)
