"""The clock port: the machine's, and one that tests move by hand."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """`now` is for people to read and may jump; `elapsed_s` only ever grows, from wherever it began:
    durations are its differences."""

    def now(self) -> datetime: ...
    def elapsed_s(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Now is now."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def elapsed_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """Stands still until `advance`; sleeping moves it."""

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
    """The time by the clock that stamps events: what the log `told` last, and how long ago that was by a
    clock that only grows. A wall clock that jumps, or two that differ, change nothing in it."""

    def __init__(self, clock: Clock) -> None:
        """Until something is told, it is what `clock` shows."""
        self._clock = clock
        self.observe(clock.now())

    def observe(self, now: datetime) -> None:
        """It is `now` there."""
        self._last, self._at_s = now, self._clock.elapsed_s()

    def now(self) -> datetime:
        return self._last + timedelta(seconds=self._clock.elapsed_s() - self._at_s)
