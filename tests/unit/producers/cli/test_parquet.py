"""Parquet files are converted to JSON Lines by the CLI; the server never reads Parquet."""

import importlib.util
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from producers.core.datasets.rules import check_file
from tests.unit.producers.cli.conftest import FakeServer, Run

MADE = {"dataset": {"id": "d1"}, "upload": {"path": "/api/v1/datasets/d1/content"}}


def write_parquet(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize(
    "columns",
    [
        {"user_prompt": [f"{n}?" for n in range(2000)], "ground_truth": ["ü"] * 2000},
        {
            "messages": [[{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]]
            * 5
        },
        {"metadata": [{"level": 1, "tags": ["a"]}] * 4},
    ],
    ids=("prompts", "messages", "metadata"),
)
def test_it_is_sent_as_lines_that_the_server_takes(
    columns: dict[str, list[object]], server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    num = len(next(iter(columns.values())))
    file = write_parquet(tmp_path / "My Rows.parquet", **columns, picture=[b"\xff\x00"] * num)
    server.answer("POST", "/datasets", MADE, status=201)
    server.answer("PUT", "/datasets/d1/content", {"dataset": {"name": "my-rows", "num_rows": num}})
    assert headrace("dataset", "upload", str(file), "--json").code == 0
    assert server.requests[0].document == {"name": "my-rows", "file_name": "My Rows.jsonl"}
    sent = tmp_path / "sent.jsonl"
    sent.write_bytes(server.requests[1].body)
    report = check_file(sent, "jsonl", lambda row: None)
    assert (report.issues, report.num_rows, report.columns) == ([], num, tuple(columns))


def test_it_is_validated_the_same_way(server: FakeServer, headrace: Run, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "rows.parquet", user_prompt=["1?"], ground_truth=["1"])
    valid = {"valid": True, "num_rows": 1, "columns": ["user_prompt", "ground_truth"]}
    server.answer("POST", "/datasets/validate", valid)
    assert headrace("dataset", "validate", str(file)).code == 0
    [request] = server.requests
    assert request.query == "file_name=rows.jsonl"
    assert request.body == b'{"user_prompt": "1?", "ground_truth": "1"}\n'


def test_mapped_columns_are_sent_beside_those_that_need_no_mapping(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    columns: dict[str, list[object]] = {"question": ["1?"], "system_prompt": ["s"], "level": [1]}
    file = write_parquet(tmp_path / "rows.parquet", **columns, answer=["1"])
    valid = {"valid": True, "num_rows": 1, "columns": ["user_prompt"]}
    server.answer("POST", "/datasets/validate", valid)
    maps = ("--map", "question=user_prompt", "--map", "answer=ground_truth")
    assert headrace("dataset", "validate", str(file), *maps).code == 0
    [request] = server.requests
    assert json.loads(request.body) == {"question": "1?", "system_prompt": "s", "answer": "1"}


def test_a_file_that_is_none_ends_before_anything_is_sent(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 and no more")
    ran = headrace("dataset", "upload", str(file), "--json")
    assert ran.code == 1
    assert "is not a readable Parquet file" in ran.error["message"]
    assert server.requests == []


def test_without_pyarrow_it_says_what_to_install(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_parquet(tmp_path / "rows.parquet", user_prompt=["1?"], ground_truth=["1"])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name)
    )
    ran = headrace("dataset", "upload", str(file), "--json")
    assert ran.code == 1
    assert "pip install 'headrace[parquet]'" in ran.error["message"]
    assert server.requests == []
