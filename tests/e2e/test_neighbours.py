"""A small run beside a large one: its first sample and its end come nearly as soon as without it, and
the large one can be stopped at once."""

from pathlib import Path

import pytest

from tests.kit.neighbours import (
    begin_large_run,
    longest_effect_s,
    median,
    num_waiting,
    prepare,
    stop_s,
    time_small_run,
)
from tests.kit.platform import eventually, platform

pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timed,
]

GROUPS, SAMPLES, AHEAD = 64, 8, 16
TRIES = 3
"""The middle one of so many small runs has to be in time, by its first sample and by its end."""

SERIES = 3
"""One of so many series has to be in time, because a test machine has other work. Each has a platform
of its own and takes the times alone again, because a machine is faster at one time than at another."""


def test_a_small_run_beside_a_large_one_is_not_kept_waiting(tmp_path: Path) -> None:
    late = []
    for number in range(SERIES):
        why = times_beside_a_large_run(tmp_path / str(number))
        if not why:
            return
        late.append(why)
    pytest.fail("\n".join(late))


def times_beside_a_large_run(directory: Path) -> str:
    """Take the times of a series. Returns why they are too long, or nothing."""
    directory.mkdir()
    with platform(directory / "home") as running:
        prepare(running, directory / "workspace", groups=GROUPS)
        alone = median(time_small_run(running) for _ in range(TRIES))
        large = begin_large_run(running, groups=GROUPS, samples=SAMPLES, ahead=AHEAD)
        assert num_waiting(running) > GROUPS * SAMPLES
        beside = median(time_small_run(running) for _ in range(TRIES))
        assert num_waiting(running) > GROUPS * SAMPLES, "the large run had work all the time"
        first_s = 2 * alone.first_s + longest_effect_s(running, large)
        assert stop_s(running, large) < 60
        eventually(
            lambda: True if not running.get("/status")["effects"] else None,
            within_s=20,
            what="a stopped run leaves nothing behind",
        )
    if beside.first_s <= first_s and beside.end_s <= 3 * alone.end_s:
        return ""
    return (
        f"alone {alone}, beside the large run {beside}; the first sample may take {first_s:.2f} s, "
        f"and the end {3 * alone.end_s:.2f} s"
    )
