"""Requests to import evaluations, and their files: what is refused, by which field."""

import json
from typing import Any

import pytest

from producers.core.evaluations.import_request import ImportRequest
from producers.core.evaluations.imported_results import (
    check_progress,
    compute_figures,
    parse_index,
    record_of,
)
from producers.core.evaluations.trajectories import AtifTrajectory
from schemas.errors import InvalidConfig
from tests.kit.local_evaluation import (
    LocalEvaluation,
    attempt_id,
    in_lines,
    line,
    local_evaluation,
    trajectory,
)

LOCAL = local_evaluation(b"{}\n" * 5)


def refusal(body: dict[str, Any]) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as refused:
        ImportRequest.parse(body)
    return refused.value


def read_all(local: LocalEvaluation) -> None:
    """Read all files as an import does."""
    request = ImportRequest.parse(local.request())
    rows = parse_index(local.files["index.jsonl"], request, num_rows=2)
    check_progress(local.files["progress.json"], request, num_rows=2, of=5)
    for attempt in (one for row in rows for one in row if one.trajectory):
        named = str(attempt.trajectory)
        record_of(attempt, 0, AtifTrajectory.parse(local.files[named], named), None)


@pytest.mark.parametrize("rows", ["1,5", "3,1", "3-1", "1,1"])
def test_rows_that_the_dataset_does_not_have_are_refused(rows: str) -> None:
    body = LOCAL.request()
    body["run"]["experiment_config"]["dataset"]["selected_source_rows"] = rows
    with pytest.raises(InvalidConfig) as refused:
        ImportRequest.parse(body).selected_rows(5)
    assert refused.value.issues[0].key.endswith("dataset.selected_source_rows")


FIRST = f"rollout_trials/{attempt_id(0, 0)}/"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../index.jsonl", "relative"),
        ("/etc/passwd", "relative"),
        (f"{FIRST}artifacts/../../x", "relative"),
        (f"{FIRST}artifacts/a\\b", "backslash"),
        (f"{FIRST}artifacts/a\0b", "control"),
        (f"{FIRST}artifacts/{'x' * 300}", "255 bytes"),
        (f"{FIRST}artifacts/{'y/' * 600}z", "at most 1024"),
        (f"{FIRST}artifacts/\ud800", ""),
        ("secrets.txt", "index.jsonl"),
        (f"{FIRST}artifacts/notes", "folder of another file"),
        ("rollout_trials/xyz/trajectory.json", "index.jsonl"),
    ],
)
def test_a_hostile_path_is_refused_by_its_field(path: str, why: str) -> None:
    body = LOCAL.request()
    body["files"].append({"path": path, "size": 1, "sha256": "ab" * 32})
    refused = refusal(body)
    assert [one.key for one in refused.issues] == [f"files.{len(body['files']) - 1}.path"]
    assert why in refused.message


def _set(body: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        body = body[name]
    body[last] = value


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("schema_version", 2, ""),
        ("local_run_id", "A1" * 16, ""),
        ("manifest_digest", "zz", ""),
        ("run.name", "", ""),
        ("run.completed_at", "2020-01-01T00:00:00Z", ""),
        ("run.started_at", "2020-01-01T00:00:00", ""),
        ("run.evaluation_config.n", 0, ""),
        ("run.evaluation_config.n", True, ""),
        ("run.experiment_config.dataset.selected_source_rows", "1;3", ""),
        ("run.experiment_config.dataset.sha256", "ab", ""),
        ("run.experiment_config.rollout.name", "\u0007bell", ""),
        ("provenance", {f"k{n}": "v" for n in range(99)}, ""),
        ("files", [], ""),
        ("files", [{"path": "logs.txt", "size": 1, "sha256": "ab" * 32}] * 2, "files.1.path"),
        (
            "files",
            [{"path": "index.jsonl", "size": 9 << 20, "sha256": "ab" * 32}] * 2,
            "files.0.size",
        ),
    ],
)
def test_a_wrong_field_is_named(key: str, value: Any, field: str) -> None:
    body = LOCAL.request()
    _set(body, key, value)
    assert refusal(body).issues[0].key == (field or key)


BOMB = b"[" * 100_000


@pytest.mark.parametrize(
    ("path", "data", "field"),
    [
        ("index.jsonl", BOMB, "index.jsonl:1"),
        ("index.jsonl", b"\xff", "index.jsonl"),
        ("index.jsonl", in_lines([line(0, 0)]), "index.jsonl"),
        ("index.jsonl", in_lines([line(0, 0), line(0, 0)]), "index.jsonl:2"),
        ("index.jsonl", in_lines([line(2, 0)]), "index.jsonl:1"),
        ("index.jsonl", in_lines([line(0, 0)] * 9), "index.jsonl"),
        ("index.jsonl", in_lines([line(0, 0, float("nan"))]), "index.jsonl:1"),
        ("index.jsonl", in_lines([line(0, 0, float("inf"))]), "index.jsonl:1"),
        ("index.jsonl", in_lines([line(0, 0, 1e300)]), "index.jsonl:1.reward"),
        ("index.jsonl", in_lines([line(0, 0, tokens=-1)]), "index.jsonl:1.tokens"),
        (
            "progress.json",
            b'{"total_runs": 9, "sampled_rows": 2, "total_dataset_rows": 5}',
            "progress.json.total_runs",
        ),
        (
            "progress.json",
            b'{"total_runs": 4, "sampled_rows": 2, "total_dataset_rows": 9}',
            "progress.json.total_dataset_rows",
        ),
        (f"{FIRST}trajectory.json", BOMB, f"{FIRST}trajectory.json"),
        (f"{FIRST}trajectory.json", b"{}", f"{FIRST}trajectory.json"),
        (
            f"{FIRST}trajectory.json",
            json.dumps(trajectory(0, 1)).encode(),
            f"{FIRST}trajectory.json",
        ),
        (f"rollout_trials/{'0' * 32}/artifacts/x", b"x", "files"),
        (f"{FIRST}trajectory_2.json", b"{}", "files"),
    ],
)
def test_a_file_that_is_not_that_of_a_run_is_refused(path: str, data: bytes, field: str) -> None:
    local = LOCAL.with_file(path, data)
    with pytest.raises(InvalidConfig) as refused:
        read_all(local)
    found = refused.value.issues[0].key
    assert found == field or (field == "files" and found.startswith("files."))


def test_the_files_of_a_run_are_read() -> None:
    read_all(LOCAL)


def test_an_import_in_another_order_is_the_same() -> None:
    body = LOCAL.request()
    turned = ImportRequest.parse({**body, "files": body["files"][::-1]})
    assert turned.content_sha256 == ImportRequest.parse(body).content_sha256
    other = LOCAL.with_file("logs.txt", b"other")
    assert ImportRequest.parse(other.request()).content_sha256 != turned.content_sha256


def test_figures_count_what_failed_and_not_what_was_skipped() -> None:
    request = ImportRequest.parse(LOCAL.request())
    rows = parse_index(LOCAL.files["index.jsonl"], request, num_rows=2)
    grades = [
        [one.grade(index) for index, one in enumerate(row) if one.status != "skipped"]
        for row in rows
    ]
    figures = compute_figures(grades, n=2, threshold=0.5)
    assert figures.reward == pytest.approx((1 + 0.25 + 0) / 3)
    assert figures.metrics["eval/pass_rate"] == pytest.approx(1 / 3)
    assert figures.metrics["eval/pass@1"] == 0.5
