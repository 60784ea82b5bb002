"""The time of events comes from the log, whose clock only moves forward."""

from datetime import UTC, datetime, timedelta

from infra.spine.ports.clock import LogTime

TRUE = datetime(2026, 1, 1, tzinfo=UTC)


class Shaken:
    """A machine whose wall clock is set by somebody."""

    def __init__(self) -> None:
        self.wall, self.grown = TRUE, 100.0

    def now(self) -> datetime:
        return self.wall

    def elapsed_s(self) -> float:
        return self.grown

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def test_a_wall_clock_that_jumps_changes_nothing() -> None:
    clock = Shaken()
    time = LogTime(clock)
    time.observe(TRUE + timedelta(days=1))
    clock.grown += 5
    clock.wall += timedelta(hours=1)
    assert time.now() == TRUE + timedelta(days=1, seconds=5)
    clock.wall -= timedelta(hours=2)
    clock.grown += 5
    assert time.now() == TRUE + timedelta(days=1, seconds=10)


def test_the_time_of_the_log_counts_from_then_on() -> None:
    clock = Shaken()
    time = LogTime(clock)
    assert time.now() == TRUE, "nothing was told yet"
    clock.grown += 5
    time.observe(TRUE + timedelta(seconds=60))
    clock.grown += 1
    assert time.now() == TRUE + timedelta(seconds=61)
