"""The statistics of a dataset's file: right for good rows, bounded for hostile ones."""

import asyncio
import csv
import io
import json
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs.local import LocalBlobs
from producers.core.datasets import column_statistics, recent_statistics
from producers.core.datasets.column_statistics import (
    FEW_VALUES,
    MAX_NAME,
    MOST_COLUMNS,
    DatasetStatistics,
    ValueCount,
    compute_statistics,
)
from producers.core.datasets.readers import MAX_ROW_BYTES
from producers.core.datasets.recent_statistics import RecentStatistics, read_head
from schemas.artifact_refs import ArtifactRef
from schemas.errors import NotFound
from schemas.events import DatasetRegistered
from schemas.specs import DatasetRef

Rows = Sequence[dict[str, Any]]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CELLS = st.none() | st.booleans() | st.integers(-9, 9) | TEXTS | st.lists(st.integers(), max_size=2)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["user_prompt", "ground_truth", "level"]), CELLS, min_size=1),
    max_size=30,
)


def of(rows: Rows, **mapping: str) -> DatasetStatistics:
    return of_bytes("".join(json.dumps(row) + "\n" for row in rows).encode(), **mapping)


def of_bytes(data: bytes, kind: str = "jsonl", **mapping: str) -> DatasetStatistics:
    return compute_statistics(io.BytesIO(data), kind, mapping=mapping)


@given(ROWS)
def test_columns_are_counted_as_a_plain_count_of_their_cells(rows: Rows) -> None:
    found = of(rows)
    assert (found.rows, found.unread, found.cut) == (len(rows), 0, None)
    assert {one.name for one in found.columns} == {name for row in rows for name in row}
    for column in found.columns:
        cells = [row[column.name] for row in rows if column.name in row]
        assert sum(kind.rows for kind in column.types) == len(cells)
        filled = [cell for cell in cells if cell is not None and cell != ""]
        assert column.share == len(filled) / len(rows)
        texts = [len(cell) for cell in cells if isinstance(cell, str)]
        if texts:
            assert column.lengths is not None
            assert (column.lengths.least, column.lengths.largest) == (min(texts), max(texts))
            assert column.lengths.mean == pytest.approx(sum(texts) / len(texts))
        else:
            assert column.lengths is None
        if column.values is not None:
            assert sum(value.rows for value in column.values) == len(filled)
            assert len(column.values) <= FEW_VALUES


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_prompts_that_occur_again_are_counted(prompts: list[str]) -> None:
    again = sum(count - 1 for count in Counter(prompts).values())
    assert of([{"user_prompt": text} for text in prompts]).duplicates == again
    mapped = of(
        [{"question": text, "n": n} for n, text in enumerate(prompts)], question="user_prompt"
    )
    assert mapped.duplicates == again
    talks = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": str(n)}]}
        for n, text in enumerate(prompts)
    ]
    assert of(talks).duplicates == again, "an answer is not a part of the prompt"
    labelled = [{**talk, "label": "x"} for talk in talks]
    assert of(labelled).duplicates == 0, "with a label all messages are"
    as_text = [{"messages": json.dumps(talk["messages"])} for talk in talks]
    assert of(as_text).duplicates == again
    assert of([{"metadata": {"a": 1}}]).duplicates is None


@given(st.binary(max_size=2000), st.sampled_from(["jsonl", "csv"]))
def test_any_bytes_are_counted_without_an_error(data: bytes, kind: str) -> None:
    found = of_bytes(data, kind)
    assert found.rows + found.unread <= data.count(b"\n") + data.count(b"\r") + 1


def test_values_are_listed_when_they_are_few_and_short() -> None:
    rows = [
        {"level": n % 2, "kind": "<b>" if n else "", "n": n, "long": "x" * 41, "list": [1]}
        for n in range(20)
    ]
    found = {one.name: one for one in of(rows).columns}
    assert found["level"].values == (ValueCount("0", 10), ValueCount("1", 10))
    assert found["kind"].values == (ValueCount("<b>", 19),)
    assert found["kind"].share == 0.95
    assert found["n"].values is found["long"].values is found["list"].values is None


def test_cells_of_csv_are_texts() -> None:
    file = io.StringIO()
    csv.writer(file).writerows([("user_prompt", "label"), ("two\nlines", "1"), ("q", "")])
    found = of_bytes(file.getvalue().encode(), "csv")
    assert found.rows == 2
    assert found.columns[0].types == (ValueCount("string", 2),)
    assert found.columns[1].share == 0.5


def test_lines_that_cannot_be_read_are_counted_and_skipped() -> None:
    good = b'{"user_prompt": "q"}\n'
    bad = [
        b"\xff\xfe",
        b"x" * (8 << 20),
        b"[" * 200_000,
        b"[1]",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
    ]
    found = of_bytes(good.join(line + b"\n" for line in bad) + good)
    assert (found.rows, found.unread, found.cut) == (6, 6, None)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_rows_and_bytes_are_limited(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, row = (b"a\n", b"x\n") if kind == "csv" else (b"", b'{"a": "x"}\n')
    monkeypatch.setattr(column_statistics, "MOST_ROWS", 10)
    assert of_bytes(head + row * 10, kind).cut is None
    found = of_bytes(head + row * 11, kind)
    assert (found.rows, found.cut) == (10, "rows")
    monkeypatch.setattr(column_statistics, "MOST_BYTES", len(head + row * 5))
    assert of_bytes(head + row * 5, kind).cut is None
    found = of_bytes(head + row * 10, kind)
    assert (found.rows, found.unread, found.cut) == (5, 0, "bytes")


def test_time_is_limited_also_within_a_row_of_many_lines() -> None:
    """A cell of CSV that does not end is read line by line, and each line asks for the time."""
    ticks = iter(range(1_000_000))
    data = b'a\nx\n"' + b"y\n" * 1000
    found = compute_statistics(io.BytesIO(data), "csv", mapping={}, clock=lambda: next(ticks) / 100)
    assert (found.rows, found.unread, found.cut) == (1, 0, "time")


def test_memory_and_time_are_bounded_for_a_hostile_file() -> None:
    """One line of 8 MB, lines of 1 MB with many names or numbers, and no two prompts alike."""
    wide = json.dumps({f"{n}{'n' * 200}": "v" for n in range(4000)}).encode()
    deep = b'{"user_prompt": ' + b"[0," * 20_000 + b"0" + b"]" * 20_000 + b"}"
    lists = b'{"user_prompt": [' + b"1.5," * 200_000 + b"1]}"
    many = b"".join(b'{"user_prompt": "%d"}\n' % n for n in range(30_000))
    data = b"\n".join([b"x" * (8 << 20), wide, deep, lists, many])
    assert max(len(wide), len(deep), len(lists)) < MAX_ROW_BYTES
    tracemalloc.start()
    found = of_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert found.cut in ("rows", "time")
    assert len(found.columns) == MOST_COLUMNS
    assert found.more_columns > 1000
    assert all(len(one.name) <= MAX_NAME for one in found.columns)


async def registered(blobs: LocalBlobs, path: Path, rows: Rows) -> DatasetRegistered:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    uri = await blobs.put_file("datasets/d", path)
    ref = ArtifactRef(uri=uri, sha256="0" * 64, size=path.stat().st_size)
    return DatasetRegistered(
        dataset=DatasetRef(dataset="d", name="sums", content=ref, num_rows=len(rows)),
        columns=("user_prompt",),
        file_name="sums.jsonl",
        file_size=ref.size,
        original=ref,
    )


class Distant(LocalBlobs):
    """A store whose bytes are not files of this machine."""

    async def file(self, uri: str) -> Path | None:
        return None


@pytest.mark.parametrize("store", [LocalBlobs, Distant])
async def test_a_content_is_counted_once(
    tmp_path: Path, store: type[LocalBlobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0

    def count(*given: Any, **named: Any) -> DatasetStatistics:
        nonlocal counted
        counted += 1
        return compute_statistics(*given, **named)

    monkeypatch.setattr(recent_statistics, "compute_statistics", count)
    blobs = store(tmp_path / "blobs")
    event = await registered(blobs, tmp_path / "file", [{"user_prompt": "q"}] * 5)
    recent = RecentStatistics(blobs)
    found = await asyncio.gather(*(recent.of(event) for _ in range(8)))
    assert [one.rows for one in found if one] == [5] * 8
    assert counted == 1
    await recent.of(event.model_copy(update={"mapping": {"user_prompt": "label"}}))
    assert counted == 2
    whole = await read_head(blobs, event.original, 1 << 20)
    assert await read_head(blobs, event.original, 7) == whole[:7]


async def test_a_slow_count_is_not_waited_for_and_a_failed_one_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    event = await registered(blobs, tmp_path / "file", [{"user_prompt": "q"}] * 5)
    recent = RecentStatistics(blobs)
    assert await recent.of(event, wait_s=0) is None
    assert await recent.of(event) is not None
    gone = event.model_copy(
        update={"original": event.original.model_copy(update={"uri": f"{event.original.uri}-gone"})}
    )
    again = RecentStatistics(blobs)
    for _ in range(2):
        with pytest.raises(NotFound, match="restore it from a backup"):
            await again.of(gone)
    monkeypatch.setattr(recent_statistics, "KEPT", 1)
    other = event.model_copy(update={"mapping": {"a": "label"}})
    assert await again.of(event, wait_s=0) is None
    assert await again.of(other, wait_s=0) is None, "no room while all are being computed"
    assert await again.of(event) is not None
    assert await again.of(other) is not None
