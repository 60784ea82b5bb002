"""The figures of an evaluation and its files: their list, their exact sizes, and their content."""

import json
from typing import Any

import pytest

from tests.kit.application import Application
from tests.unit.producers.http.routes.test_evaluations import dataset, evaluated

pytestmark = pytest.mark.postgres

FILES = [
    "metrics.json",
    "logs.txt",
    "summary.jsonl",
    *(
        f"trajectories/row-00000{row}/attempt-00{number}.json"
        for row in (1, 3)
        for number in (0, 1)
    ),
]


@pytest.fixture
async def listed(app: Application) -> dict[str, int]:
    """The files of an evaluation of two rows, by path, with their sizes."""
    await evaluated(app, "one", await dataset(app), (1.0, None), (0.0, 0.5))
    return await files(app)


async def files(app: Application, **query: str) -> dict[str, int]:
    answer = await app.get("/evals/one/files", **query)
    assert answer["total_bytes"] == sum(file["size"] for file in answer["files"])
    return {file["path"]: file["size"] for file in answer["files"]}


async def content(app: Application, path: str) -> bytes:
    answer = await app.api.get(f"/api/v1/evals/one/files/{path}")
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_every_file_has_the_size_of_its_list(
    app: Application, listed: dict[str, int]
) -> None:
    assert list(listed) == FILES
    for path, size in listed.items():
        assert len(await content(app, path)) == size, path


async def test_files_say_what_the_evaluation_did(app: Application, listed: dict[str, int]) -> None:
    figures: Any = json.loads(await content(app, "metrics.json"))
    assert figures["eval"]["name"] == "one"
    assert figures["summary"]["graded"] == 3
    assert figures["summary"]["pass_at_k"] == {"1": 0.5}
    lines = (await content(app, "summary.jsonl")).decode().splitlines()
    assert [json.loads(line)["row"] for line in lines] == [1, 3]
    attempt: Any = json.loads(await content(app, FILES[4]))
    assert (attempt["row"], attempt["attempt"], attempt["reward"]) == (1, 1, None)
    assert attempt["failure"] == "timeout: too slow"
    assert attempt["messages"] == [{"role": "assistant", "content": "0.1"}]


async def test_only_wanted_files_are_listed(app: Application, listed: dict[str, int]) -> None:
    assert list(await files(app, types="metrics")) == ["metrics.json"]
    only = await files(app, types="trajectories,logs", rows="3")
    assert list(only) == ["logs.txt", "summary.jsonl", *FILES[5:]]


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "metrics.json/x",
        "trajectories/row-000002/attempt-000.json",
        "trajectories/row-000001/attempt-009.json",
        "artifacts/row-000001/attempt-000/nothing",
        "trajectories/../metrics.json",
    ],
)
async def test_another_path_is_not_a_file(
    app: Application, listed: dict[str, int], path: str
) -> None:
    answer = await app.api.get(f"/api/v1/evals/one/files/{path.replace('..', '%2e%2e')}")
    assert answer.status_code == 404


async def test_the_summary_has_the_tokens_of_all_attempts(
    app: Application, listed: dict[str, int]
) -> None:
    summary = (await app.get("/evals/one/summary"))["summary"]
    assert summary["tokens"] == 0, "these samples have none"
    assert (summary["rows"], summary["n"], summary["attempts"]) == (2, 2, 4)
    assert summary["rewards"]["median"] == 0.5
