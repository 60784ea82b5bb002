"""`headrace dataset generate`, and submits whose TOML names generated tasks."""

from pathlib import Path
from typing import Any

import pytest

from infra.sandbox import generated_rows
from infra.sandbox.environments.environments import PackageEnvironments
from schemas.errors import Refused
from schemas.toml.generated_tasks import GeneratedTasks, dataset_name
from tests.unit.producers.cli.conftest import FakeServer, Run

SUMS = "reasoning-gym:chain_sum?size=4"
HELD_OUT = f"{SUMS}&split=held_out"
ROWS = b'{"user_prompt": "1 + 1"}\n' * 4


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[GeneratedTasks]:
    """The tasks that were generated."""
    seen: list[GeneratedTasks] = []

    async def generate(tasks: GeneratedTasks, environments: PackageEnvironments) -> bytes:
        seen.append(tasks)
        if tasks.task == "broken":
            raise Refused("the tasks of broken cannot be generated: no reason")
        return ROWS

    monkeypatch.setattr(generated_rows, "generate_rows", generate)
    return seen


def answer_upload(server: FakeServer, ref: str) -> None:
    path = f"/api/v1/datasets/{dataset_name(ref)}/content"
    server.answer("POST", "/datasets", {"upload": {"path": path}}, status=201)
    dataset = {"name": dataset_name(ref), "num_rows": 4, "status": "uploaded"}
    server.answer("PUT", path.removeprefix("/api/v1"), {"dataset": dataset})


def requested(server: FakeServer, method: str) -> list[Any]:
    return [request for request in server.requests if request.method == method]


def test_tasks_are_generated_and_uploaded_once(
    server: FakeServer, headrace: Run, generated: list[GeneratedTasks]
) -> None:
    answer_upload(server, SUMS)
    ran = headrace("dataset", "generate", SUMS)
    assert ran.code == 0, ran.err
    assert f"generated {dataset_name(SUMS)}: 4 rows" in ran.out
    assert f'dataset = "{SUMS}"' in ran.out
    assert requested(server, "POST")[0].document["name"] == dataset_name(SUMS)
    assert requested(server, "PUT")[0].body == ROWS
    there = {"name": dataset_name(SUMS), "num_rows": 4, "status": "uploaded"}
    server.answer("GET", f"/datasets/{dataset_name(SUMS)}", {"dataset": there})
    again = headrace("dataset", "generate", SUMS)
    assert "was generated before" in again.out
    assert len(generated) == len(requested(server, "PUT")) == 1


def test_tasks_are_written_into_a_file_without_a_server(
    headrace: Run, generated: list[GeneratedTasks], tmp_path: Path
) -> None:
    file = tmp_path / "data" / "rows.jsonl"
    ran = headrace("dataset", "generate", SUMS, "--out", str(file))
    assert ran.out.strip() == f"wrote {file}: 4 rows; the longest question has 5 characters"
    assert file.read_bytes() == ROWS


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("reasoning-gym:broken", "the tasks of broken cannot be generated: no reason"),
        ("reasoning-gym:chain_sum?size=0", "write a whole number from 4 to 100000"),
        ("chain_sum", "'chain_sum' does not name a task; write it like reasoning-gym:"),
    ],
)
def test_a_name_that_cannot_be_generated_uploads_nothing(
    ref: str, said: str, server: FakeServer, headrace: Run, generated: list[GeneratedTasks]
) -> None:
    ran = headrace("dataset", "generate", ref)
    assert ran.code == 1
    assert said in ran.err
    assert not requested(server, "POST")


def test_a_dataset_that_was_not_generated_is_not_taken_for_one(
    server: FakeServer, headrace: Run, generated: list[GeneratedTasks]
) -> None:
    there = {"name": "sums", "num_rows": 4, "status": "uploaded"}
    server.answer("GET", "/datasets/sums", {"dataset": there})
    assert "'sums' does not name a task" in headrace("dataset", "generate", "sums").err
    assert server.requests == []


def test_a_submit_generates_what_the_server_does_not_have(
    server: FakeServer, headrace: Run, generated: list[GeneratedTasks], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[experiment]\nmodel_path = "m"\ndataset = "{SUMS}"\n'
        f'[advanced]\nalgorithm = "sft"\nvalidation_dataset = "{HELD_OUT}"\n'
    )
    there = {"name": dataset_name(SUMS), "num_rows": 4, "status": "uploaded"}
    server.answer("GET", f"/datasets/{dataset_name(SUMS)}", {"dataset": there})
    answer_upload(server, HELD_OUT)
    server.answer("POST", "/runs", {"code": "VALIDATION", "detail": "generate it"}, status=422)
    server.answer("POST", "/runs", {"run": {"name": "first", "id": "r1"}}, status=201)
    assert headrace("train", "submit", str(config), "--dry-run").code == 1
    assert generated == [], "a dry run makes nothing"
    ran = headrace("train", "submit", str(config))
    assert ran.code == 0, ran.err
    assert [tasks.split for tasks in generated] == ["held_out"]
    sent = requested(server, "POST")[-1].document["config"]
    assert sent["experiment"]["dataset"] == SUMS, "the TOML is recorded as it was written"
