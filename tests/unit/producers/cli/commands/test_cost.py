"""How costs are printed."""

from typing import Any

from producers.cli.commands.upkeep.cost import CSV_COLUMNS, _csv


def test_a_line_without_measured_seconds_has_no_hours_in_csv() -> None:
    """A run of an earlier release had 0.0 cpu_hours, as if it had cost nothing."""
    line: dict[str, Any] = {**dict.fromkeys(CSV_COLUMNS), "device_hours": {}, "wasted": {}}
    other = {**line, "device_hours": {"cpu": 0.5, "gpu.H100": 2.0}}
    heading, *rows = [row.split(",") for row in _csv([line, {**line, "key": "r"}, other]).split()]
    hours = [row[-3:] for row in (heading, *rows)]
    assert hours[0] == ["cpu_hours", "gpu.H100_hours", "wasted_s"]
    assert hours[1:] == [["", "", ""], ["", "", ""], ["0.5", "2.0", "0"]]
    one_kind = {**line, "device_hours": {"cpu": 0.5}}
    assert _csv([one_kind, other]).splitlines()[1].endswith(",0.5,0.0,0")
