"""Datasets over HTTP: announced, uploaded, checked in a confined process, and registered once."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from producers.core.datasets import registration
from schemas.errors import InvalidConfig, NotFound
from schemas.events import DatasetRegistered
from schemas.toml.generated_tasks import dataset_name
from tests.kit.application import Application, application, rows
from tests.kit.platform import run_config

pytestmark = pytest.mark.postgres


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home", confines_checks=True) as served:
        yield served


async def _find(app: Application, ref: str) -> DatasetRegistered:
    return await registration.find(app.services.log, app.services.readmodel.names, ref)


async def test_a_dataset_is_announced_sent_and_readable(app: Application) -> None:
    made = await app.post("/datasets", {"name": "sums", "file_name": "sums.jsonl"})
    assert made.status_code == 201
    assert made.json()["dataset"]["status"] == "pending"
    assert (await app.get("/datasets/sums"))["dataset"]["status"] == "pending"
    path = made.json()["upload"]["path"]
    put = await app.api.put(path, content=rows(6).encode())
    assert put.status_code == 200, put.text
    shown = put.json()["dataset"]
    assert shown["status"] == "uploaded"
    assert shown["num_rows"] == 6
    assert shown["columns"] == ["user_prompt", "ground_truth"]
    assert (await app.get("/datasets"))["total_count"] == 1
    assert (await app.get(f"/datasets/{shown['id']}"))["dataset"] == shown
    preview = await app.get("/datasets/sums/preview", rows=2)
    assert [row["label"] for row in preview["rows"]] == ["0", "1"]
    assert preview["rows"][0]["prompt"] == [{"role": "user", "content": "Say 0"}]
    original = await app.api.get("/api/v1/datasets/sums/content")
    assert original.text == rows(6)


async def test_a_mapping_is_recorded_and_unread_columns_are_listed(app: Application) -> None:
    content = "".join(
        json.dumps({"question": f"{n}?", "answer": str(n), "source": "web"}) + "\n"
        for n in range(4)
    )
    wrong = {"name": "gsm", "file_name": "gsm.jsonl", "mapping": {"question": "prompts"}}
    refused = await app.post("/datasets", wrong)
    assert refused.json()["issues"][0]["key"] == "mapping"
    mapping = {"question": "user_prompt", "answer": "ground_truth"}
    made = await app.post("/datasets", {**wrong, "mapping": mapping})
    put = await app.api.put(made.json()["upload"]["path"], content=content.encode())
    assert put.status_code == 200, put.text
    shown = put.json()["dataset"]
    assert shown["columns"] == ["user_prompt", "ground_truth", "source"]
    assert shown["unread_columns"] == ["source"]
    assert shown["mapping"] == mapping
    assert (await app.get("/datasets/gsm"))["dataset"] == shown
    registered = await _find(app, "gsm")
    assert registered.mapping == mapping
    assert registered.characters == "0123?"
    (row, *_) = (await app.get("/datasets/gsm/preview"))["rows"]
    assert (row["prompt"][0]["content"], row["label"]) == ("0?", "0")
    told = await app.api.post(
        "/api/v1/datasets/validate",
        params={"file_name": "x.jsonl", "mapping": json.dumps(mapping)},
        content=content.encode(),
    )
    assert told.json()["valid"]
    assert told.json()["unread_columns"] == ["source"]


async def test_a_generated_dataset_is_found_by_what_it_was_generated_from(app: Application) -> None:
    written = "reasoning-gym:chain_sum?size=6&max_terms=3"
    with pytest.raises(NotFound, match=r"generate it once with .headrace dataset generate 'reason"):
        await _find(app, written)
    put = await app.upload(dataset_name(written), rows(6))
    assert put.status_code == 200, put.text
    for same in (written, "reasoning-gym:chain_sum?max_terms=3&seed=0&size=6"):
        found = await _find(app, same)
        assert found.dataset.name == put.json()["dataset"]["name"]
    with pytest.raises(NotFound):
        await _find(app, f"{written}&split=held_out")
    with pytest.raises(InvalidConfig, match=r"size in .* is 0; write a whole number"):
        await _find(app, "reasoning-gym:chain_sum?size=0")


async def test_a_submit_says_how_a_dataset_is_generated(app: Application) -> None:
    config = run_config(
        experiment={"dataset": "reasoning-gym:chain_sum?size=6"},
        advanced={"validation_dataset": "reasoning-gym:chain_sum?size=x"},
    )
    refused = await app.post("/runs", {"config": config})
    issues = {issue["key"]: issue["message"] for issue in refused.json()["issues"]}
    assert (
        "`headrace dataset generate 'reasoning-gym:chain_sum?size=6'`"
        in issues["experiment.dataset"]
    )
    assert "is x; write a whole number from 4" in issues["advanced.validation_dataset"]


async def test_a_name_means_one_content(app: Application) -> None:
    first = await app.upload("sums", rows(6))
    again = await app.upload("sums", rows(6))
    assert first.json()["dataset"] == again.json()["dataset"]
    other = await app.upload("sums", rows(7))
    assert other.status_code == 409
    assert "another name" in other.json()["detail"]
    assert (await app.get("/datasets/sums"))["dataset"]["num_rows"] == 6


async def test_a_bad_file_is_refused_with_its_first_problems(app: Application) -> None:
    content = rows(4) + '{"user_prompt": "x"}\n' * 30
    refused = await app.upload("bad", content)
    assert refused.status_code == 400
    issues = refused.json()["issues"]
    assert len(issues) == 20
    assert issues[0]["key"] == "line 5, column ground_truth"
    missing = "is missing, and the first row has it; add it, or remove the row"
    assert issues[0]["message"] == f'{missing}; the row begins with {{"user_prompt": "x"}}'
    shown = (await app.get("/datasets/bad"))["dataset"]
    assert shown["status"] == "error"
    assert "line 5" in shown["error"]
    assert (await app.upload("bad", rows(4))).status_code == 200
    assert (await app.get("/datasets/bad"))["dataset"]["status"] == "uploaded"


async def test_an_unreadable_file_is_refused_by_name(app: Application) -> None:
    parquet = await app.upload("p", b"PAR1", "p.parquet")
    assert parquet.status_code == 400
    assert "not a Parquet file" in parquet.json()["detail"]
    bad_name = await app.upload("a/b", rows(4))
    assert bad_name.status_code == 400
    unannounced = await app.api.put("/api/v1/datasets/0123/content", content=b"")
    assert unannounced.status_code == 404


async def test_a_file_is_validated_without_being_kept(app: Application) -> None:
    async def ask(content: str) -> object:
        answer = await app.api.post(
            "/api/v1/datasets/validate", params={"file_name": "x.jsonl"}, content=content.encode()
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    good = {
        "valid": True,
        "num_rows": 4,
        "columns": ["user_prompt", "ground_truth"],
        "unread_columns": [],
        "issues": [],
    }
    assert await ask(rows(4)) == good
    bad = await ask("")
    assert isinstance(bad, dict)
    assert bad["valid"] is False
    assert (await app.get("/datasets"))["total_count"] == 0


async def test_200_megabytes_in_one_row_are_streamed_and_refused(app: Application) -> None:
    made = await app.post("/datasets", {"name": "huge", "file_name": "huge.jsonl"})

    async def body() -> AsyncIterator[bytes]:
        yield b'{"user_prompt": "'
        for _ in range(200):
            yield b"x" * (1 << 20)

    refused = await app.api.put(made.json()["upload"]["path"], content=body())
    assert refused.status_code == 400
    assert "line 1 must have at most" in refused.json()["detail"]
    assert not list((app.services.settings.home / "uploads").iterdir())


async def test_a_file_over_the_limit_is_refused_while_it_comes(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "MAX_FILE_BYTES", 1000)
    refused = await app.upload("big", rows(100))
    assert refused.status_code == 400
    assert "split it" in refused.json()["detail"]


async def test_a_file_that_needs_too_much_memory_takes_only_its_reader_down(
    tmp_path: Path,
) -> None:
    path = tmp_path / "wide.jsonl"
    with path.open("w") as file:
        for row in range(200):
            keys = ",".join(f'"{row}-{n}":{n}' for n in range(10_000))
            file.write(f'{{"metadata":{{{keys}}}}}\n')
    checked = await registration.check(path, "jsonl", memory_bytes=192 << 20)
    assert "limits" in checked.report.issues[0].message


async def test_text_of_any_kind_comes_back_as_it_was(app: Application) -> None:
    odd = "ünï\u2028 \x00 \U0001f600 </script>"
    content = "".join(
        json.dumps({"user_prompt": odd, "ground_truth": str(n)}) + "\n" for n in range(4)
    )
    assert (await app.upload("odd", content)).status_code == 200
    preview = await app.get("/datasets/odd/preview")
    assert preview["rows"][0]["prompt"][0]["content"] == odd
