"""Numbers with units, and how much time is left."""

from datetime import UTC, datetime, timedelta

import pytest

from producers.cli.display.units import (
    distinct_names,
    format_count,
    format_duration,
    format_size,
    run_eta_s,
    run_status,
    run_step,
    time_left,
)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (2000 << 40, "2,000.0 TiB"),
        (None, None),
        ("12", None),
    ],
)
def test_sizes_are_shown_in_binary_units(number: object, shown: str | None) -> None:
    assert format_size(number) == shown


def test_durations_and_counts() -> None:
    assert [format_duration(s) for s in (0.25, 45, 90, 5400, 200_000)] == [
        "0.25 s",
        "45 s",
        "1.5 min",
        "1.5 h",
        "2.3 d",
    ]
    assert [format_count(n) for n in (999, 596_049_920, 7e9)] == ["999", "596 M", "7 B"]
    assert (time_left(None), time_left(120)) == ("", " (about 2.0 min left)")


def test_the_time_left_is_estimated_only_for_a_run_that_steps() -> None:
    now = datetime(2030, 1, 1, 1, tzinfo=UTC)
    run = {
        "status": "running",
        "phase": "train",
        "current_step": 2,
        "total_steps": 8,
        "started_at": (now - timedelta(seconds=100)).isoformat(),
    }
    assert run_eta_s(run, now=now) == 300.0
    paused = {**run, "phase": "paused"}
    assert run_status(paused) == "paused"
    assert run_eta_s(paused, now=now) is None
    assert run_eta_s({**run, "current_step": 0}, now=now) is None
    assert run_eta_s({**run, "status": "finished"}, now=now) is None
    assert run_eta_s({**run, "current_step": 6, "parent_step": 4}, now=now) == 100.0
    assert run_eta_s({**run, "current_step": 4, "parent_step": 4}, now=now) is None
    assert run_step({"status": "pending"}) == "0/?"


def test_things_of_one_name_have_their_ids_behind_it() -> None:
    listed = [
        {"id": "a1", "name": "first"},
        {"id": "b2", "name": "first"},
        {"id": "c3", "name": "x"},
    ]
    assert distinct_names(listed) == ["first (a1)", "first (b2)", "x"]
    assert distinct_names(listed[1:]) == ["first", "x"]
    assert distinct_names([]) == []
