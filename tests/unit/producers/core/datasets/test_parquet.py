"""Parquet files of datasets: they become the rows of the same data in JSON Lines, and hostile ones are
refused within the limits of the check."""

import datetime
import decimal
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producers.core.datasets import parquet as reader
from producers.core.datasets import registration
from producers.core.datasets.rules import FileReport, check_file
from schemas.errors import InvalidConfig

PROMPTS = {"user_prompt": [f"say {n}" for n in range(5)], "ground_truth": ["1"] * 5}
CHAT = [
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "The Rhine."},
]


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    file = path / "rows.parquet"
    pq.write_table(pa.table(columns), file, **options)
    return file


def checked(file: Path, kind: str = "parquet", **more: Any) -> tuple[FileReport, bytes]:
    lines: list[bytes] = []
    report = check_file(file, kind, lines.append, **more)
    return report, b"".join(lines)


@pytest.mark.parametrize(
    "columns",
    [
        PROMPTS,
        {**PROMPTS, "ground_truth": [1, 2, 3, 4, 2**53]},
        {**PROMPTS, "ground_truth": [0.5, 1e-9, 3.0, -0.0, 1e300]},
        {**PROMPTS, "system_prompt": ["", "a", "\u00e4", "\U0001f600", "b"]},
        {"messages": [CHAT] * 5},
        {"metadata": [{"tests": ["a", "b"], "limit": n, "deep": {"x": [n]}} for n in range(5)]},
        {**PROMPTS, "unread": [{"a": [1]}] * 5},
        {"prompt": ["p"] * 5, "completion": ["c"] * 5, "label": [True, False] * 2 + [True]},
    ],
)
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_parquet_becomes_the_rows_of_the_same_json_lines(
    tmp_path: Path, columns: dict[str, Any], compression: str
) -> None:
    text = tmp_path / "rows.jsonl"
    table = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    text.write_text("".join(json.dumps(row) + "\n" for row in table))
    ours = checked(written(tmp_path, columns, compression=compression))
    assert ours == checked(text, "jsonl")
    assert ours[0].issues == []
    assert ours[0].num_rows == 5


def test_a_column_is_read_under_another_name(tmp_path: Path) -> None:
    file = written(tmp_path, {"question": ["a?"] * 5, "answer": [1] * 5, "other": [b"\xff"] * 5})
    named = {"question": "user_prompt", "answer": "ground_truth"}
    report, lines = checked(file, mapping=named)
    assert (report.issues, report.num_rows, len(lines.splitlines())) == ([], 5, 5)
    assert "other" in report.columns


def test_a_dictionary_and_many_row_groups_are_read(tmp_path: Path) -> None:
    words = pa.array(["a", "b"] * 100).dictionary_encode()
    file = written(tmp_path, {"user_prompt": words, "ground_truth": ["1"] * 200}, row_group_size=7)
    assert checked(file)[0].num_rows == 200


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([datetime.datetime(2026, 1, 1)] * 5, "timestamp"),  # noqa: DTZ001 - Parquet's own
        ([datetime.date(2026, 1, 1)] * 5, "date32"),
        ([decimal.Decimal("1.5")] * 5, "decimal"),
        ([b"\x00"] * 5, "binary"),
        ([[{"x": b"\x00"}]] * 5, "binary"),
        (pa.array([[("a", "b")]] * 5, pa.map_(pa.string(), pa.string())), "map"),
    ],
)
def test_a_type_that_json_lacks_is_named_with_its_column(
    tmp_path: Path, values: Any, said: str
) -> None:
    report, _ = checked(written(tmp_path, {**PROMPTS, "metadata": values}))
    [issue] = report.issues
    assert issue.column == "metadata"
    assert said in issue.message
    assert checked(written(tmp_path, {**PROMPTS, "unread": values}))[0].issues == []


@pytest.mark.parametrize(("levels", "is_fine"), [(20, True), (40, False)])
def test_a_type_that_is_nested_too_deep_is_refused(
    tmp_path: Path, levels: int, is_fine: bool
) -> None:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": value}
    report, _ = checked(written(tmp_path, {"metadata": [value] * 5}))
    assert (report.issues == []) == is_fine
    assert is_fine or "nested deeper than 32" in report.issues[0].message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_refused_as_in_json(tmp_path: Path, value: float) -> None:
    labels = [1.0, value, 2.0, 3.0, 4.0]
    report, _ = checked(written(tmp_path, {**PROMPTS, "ground_truth": labels}))
    [issue] = report.issues
    assert (issue.line, issue.column) == (2, "ground_truth")
    assert "NaN" in issue.message


def test_a_row_that_is_too_long_is_refused(tmp_path: Path) -> None:
    texts = ["a", "b", "x" * (1 << 20), "c", "d"]
    report, _ = checked(written(tmp_path, {**PROMPTS, "user_prompt": texts}))
    [issue] = report.issues
    assert (issue.line, "at most 1048576 bytes" in issue.message) == (3, True)


def hostile(tmp_path: Path) -> dict[str, bytes]:
    """Files that lie or ask for too much."""
    good = written(tmp_path, PROMPTS).read_bytes()
    footer = int.from_bytes(good[-8:-4], "little")
    start = len(good) - 8 - footer
    return {
        "empty": b"",
        "no magic": b"PAR1" + good[4:-1] + b"X",
        "cut": good[: len(good) // 2],
        "only magic": b"PAR1" * 4,
        "a long footer": good[:-8] + (2**31).to_bytes(4, "little") + b"PAR1",
        "a short footer": good[:-8] + (footer - 3).to_bytes(4, "little") + b"PAR1",
        "zeros for the footer": good[:start] + bytes(footer) + good[-8:],
        "a footer of lists": good[:start] + b"\x19\xfc\xff\xff\xff\xff\x0f" * 99 + good[-8:],
        "noise for the pages": b"PAR1" + os.urandom(start - 4) + good[start:],
    }


@pytest.mark.parametrize(
    "name",
    [
        "empty",
        "no magic",
        "cut",
        "only magic",
        "a long footer",
        "a short footer",
        "zeros for the footer",
        "a footer of lists",
        "noise for the pages",
    ],
)
async def test_a_hostile_file_is_refused_in_the_check(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hostile"
    file.write_bytes(hostile(tmp_path)[name])
    found = await registration.check(file, "parquet")
    assert len(found.report.issues) == 1
    assert "file" in found.report.issues[0].key


async def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * 2000, pa.int32()), pa.array(["x" * (40 << 20)])
    )
    file = written(
        tmp_path, {"user_prompt": texts, "ground_truth": ["1"] * 2000}, compression="zstd"
    )
    assert file.stat().st_size < 1 << 20
    found = await registration.check(file, "parquet", memory_bytes=1 << 30)
    assert len(found.report.issues) >= 1


async def test_an_ordinary_file_is_read_within_the_limits(tmp_path: Path) -> None:
    file = written(tmp_path, {"user_prompt": ["x" * 1000] * 5000, "ground_truth": ["1"] * 5000})
    found = await registration.check(file, "parquet")
    assert (found.report.issues, found.report.num_rows) == ([], 5000)


async def test_a_server_without_pyarrow_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidConfig, match="convert it to JSON Lines"):
        registration.file_kind("rows.parquet")


def test_without_the_check_of_its_ends_a_file_reaches_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: a footer that is too long is refused before pyarrow sees it."""
    file = tmp_path / "hostile"
    file.write_bytes(hostile(tmp_path)["a long footer"])
    assert "too long" in checked(file)[0].issues[0].message
    monkeypatch.setattr(reader, "_footer_problem", lambda _: None)
    assert "not a readable Parquet file" in checked(file)[0].issues[0].message


@pytest.mark.parametrize(("ratio", "is_read"), [(200, False), (100_000, True)])
def test_rows_of_one_repeated_text_end_the_check_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: int, is_read: bool
) -> None:
    """The twin reads them: 2 KB become 2 MB."""
    monkeypatch.setattr(reader, "SPARE_BYTES", 1 << 16)
    monkeypatch.setattr(reader, "MAX_RATIO", ratio)
    prompts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["x" * 1000])
    columns = {"user_prompt": prompts, "ground_truth": ["1"] * 2000}
    file = written(tmp_path, columns, compression="zstd")
    report, _ = checked(file)
    assert (not report.issues) == is_read
    if not is_read:
        assert "200 times its size" in report.issues[0].message
        assert report.num_rows < 1500
