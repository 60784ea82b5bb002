"""A small run beside a large one: its first sample and its end come nearly as soon as without it, and
the large one can be stopped at once."""

from pathlib import Path

import pytest

from tests.kit.neighbours import (
    begin_large_run,
    longest_effect_s,
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
TRIES = 5
"""Of so many small runs one has to be in time, because a test machine has other work."""


def test_a_small_run_beside_a_large_one_is_not_kept_waiting(tmp_path: Path) -> None:
    with platform(tmp_path / "home") as running:
        prepare(running, tmp_path / "workspace", groups=GROUPS)
        alone = time_small_run(running)
        large = begin_large_run(running, groups=GROUPS, samples=SAMPLES, ahead=AHEAD)
        assert num_waiting(running) > GROUPS * SAMPLES
        beside = []
        for _ in range(TRIES):
            beside.append(took := time_small_run(running))
            first_s = 2 * alone.first_s + longest_effect_s(running, large)
            if took.first_s <= first_s and took.end_s <= 3 * alone.end_s:
                break
        else:
            pytest.fail(f"alone {alone}, beside the large run {beside}")
        assert num_waiting(running) > GROUPS * SAMPLES, "the large run had work all the time"
        assert stop_s(running, large) < 60
        eventually(
            lambda: True if not running.get("/status")["effects"] else None,
            within_s=20,
            what="a stopped run leaves nothing behind",
        )
