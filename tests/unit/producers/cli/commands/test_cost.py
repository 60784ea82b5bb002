"""`headrace cost --csv`, which people open in a spreadsheet."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from producers.cli.commands.upkeep.cost import CSV_COLUMNS, _csv
from tests.unit.producers.cli.conftest import FakeServer, Run

NUMBERS = ("tokens_sampled", "tokens_trained", "tokens_discarded", "stored_bytes")


def cells(
    server: FakeServer, headrace: Run, by: str, lines: Sequence[dict[str, object]]
) -> list[dict[str, str]]:
    common: dict[str, object] = {
        "device_hours": {"cpu": 1.0},
        "effects": {},
        "wasted": {},
        "cost": None,
        "cost_wasted": None,
        "calls_usd": 0.0,
        **dict.fromkeys(NUMBERS, 0),
    }
    total: dict[str, object] = {**common, "unpriced_devices": []}
    whole = [{**common, **line} for line in lines]
    answer = {"by": by, "lines": whole, "num_lines": len(whole), "total": total}
    server.answer("GET", "/cost", answer)
    return list(csv.DictReader(io.StringIO(headrace("cost", "--by", by, "--csv").out)))


def test_an_unknown_user_is_an_empty_cell_and_a_formula_is_text(
    server: FakeServer, headrace: Run
) -> None:
    users: list[dict[str, object]] = [
        {"key": key, "name": None, "workspace_name": None} for key in ("", "=1+1")
    ]
    assert [one["key"] for one in cells(server, headrace, "user", users)] == ["", "'=1+1"]


def test_a_workspace_has_its_own_name(server: FakeServer, headrace: Run) -> None:
    [one] = cells(
        server, headrace, "workspace", [{"key": "w1", "name": None, "workspace_name": "sums"}]
    )
    assert (one["key"], one["name"], one["cpu_hours"]) == ("w1", "sums", "1.0")


def test_a_line_without_measured_seconds_has_no_hours_in_csv() -> None:
    """A run of an earlier release had 0.0 cpu_hours, as if it had cost nothing."""
    line: dict[str, Any] = {**dict.fromkeys(CSV_COLUMNS), "device_hours": {}, "wasted": {}}
    other = {**line, "device_hours": {"cpu": 0.5, "gpu.H100": 2.0}}
    heading, *rows = [
        row.split(",") for row in _csv([line, {**line, "key": "r"}, other], by="run").split()
    ]
    hours = [row[-3:] for row in (heading, *rows)]
    assert hours[0] == ["cpu_hours", "gpu.H100_hours", "wasted_s"]
    assert hours[1:] == [["", "", ""], ["", "", ""], ["0.5", "2.0", "0"]]
    one_kind = {**line, "device_hours": {"cpu": 0.5}}
    assert _csv([one_kind, other], by="run").splitlines()[1].endswith(",0.5,0.0,0")
