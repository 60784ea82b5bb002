"""Versions of datasets: which one a name means, what a run keeps, and what a deletion refuses."""

import asyncio
import hashlib
import io
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from infra.readmodel.run_pages import RunFilter, RunKind
from infra.readmodel.runs import PageRange
from producers.core.datasets import registration
from producers.core.datasets.versions import load_versions, split_version
from schemas.artifact_refs import ArtifactRef
from schemas.events import EvaluationRequested, RunRequested
from schemas.specs import DatasetRef
from tests.kit.application import Application, rows
from tests.kit.specs import template
from tests.kit.story import beginning
from tests.unit.producers.http.test_transfers import begin, ended, send, upload

pytestmark = pytest.mark.postgres


def data(count: int) -> bytes:
    return rows(count).encode()


async def version(app: Application, count: int) -> Any:
    return await upload(app, "sums", data(count), overwrite=True)


async def test_a_name_means_the_newest_version(app: Application) -> None:
    first, second = await version(app, 5), await version(app, 6)
    assert [first["version"], second["version"]] == [1, 2]
    assert first["series"] == second["series"] == first["id"] != second["id"]
    for ref, count in (
        ("sums", 6),
        ("sums@2", 6),
        ("sums@1", 5),
        (first["id"], 5),
        (second["id"], 6),
    ):
        assert (await app.get(f"/datasets/{ref}"))["dataset"]["num_rows"] == count
        content = await app.api.get(f"/api/v1/datasets/{ref}/content")
        assert content.content == data(count)
    for absent in ("sums@3", "sums@0", "sums@01", "sums@x", "sums@"):
        assert (await app.api.get(f"/api/v1/datasets/{absent}")).status_code == 404
    assert "has no version 3; it has 1, 2" in (await app.api.get("/api/v1/datasets/sums@3")).text
    listed = (await app.get("/datasets"))["datasets"]
    assert [(one["name"], one["version"]) for one in listed] == [("sums", 2)]
    found = (await app.get("/datasets/sums/versions"))["versions"]
    assert [one["version"] for one in found] == [2, 1]


async def test_the_same_content_is_the_same_version(app: Application) -> None:
    await version(app, 5)
    assert (await version(app, 5))["version"] == 1
    assert (await version(app, 6))["version"] == 2
    assert (await version(app, 5))["version"] == 3
    sha256 = hashlib.sha256(data(5)).hexdigest()
    assert (await begin(app, "sums", data(5), sha256=sha256))["dataset"]["version"] == 3


async def test_other_content_needs_overwrite(app: Application) -> None:
    await version(app, 5)
    body = {"name": "sums", "file_name": "r.jsonl", "file_size": len(data(6))}
    refused = await app.post("/datasets", body)
    assert refused.status_code == 409
    assert "--overwrite" in refused.json()["detail"]


async def test_of_two_uploads_of_one_name_one_wins(app: Application) -> None:
    begun = [await begin(app, "sums", data(count)) for count in (5, 6)]
    named = [await send(app, one, data(count)) for one, count in zip(begun, (5, 6), strict=True)]
    paths = [f"/datasets/{one['dataset']['id']}/complete" for one in begun]
    answers = await asyncio.gather(
        *(app.post(path, {"parts": parts}) for path, parts in zip(paths, named, strict=True))
    )
    assert sorted(one.status_code for one in answers) in ([202, 202], [202, 409])
    found = []
    for one, answer in zip(begun, answers, strict=True):
        if answer.status_code == 202:
            found.append(await ended(app, one["dataset"]["id"]))
    assert [one["status"] for one in found].count("uploaded") == 1
    late = [path for path, one in zip(paths, answers, strict=True) if one.status_code == 409]
    for path in late:
        again = await app.post(path, {})
        assert again.status_code == 409
        assert found[0]["id"] in again.json()["detail"]
    versions = await load_versions(app.services.log, registration.dataset_id("sums"))
    assert len(versions.found) == 1


async def test_overwrites_at_once_make_a_version_each(app: Application) -> None:
    await version(app, 4)
    counts = (5, 6, 7)
    found = await asyncio.gather(*(version(app, count) for count in counts))
    assert sorted(one["version"] for one in found) == [2, 3, 4]
    assert sorted(one["num_rows"] for one in found) == [5, 6, 7]


async def test_a_version_is_deleted_alone_and_its_number_stays_used(app: Application) -> None:
    first, second = await version(app, 5), await version(app, 6)
    answer = await app.api.delete("/api/v1/datasets/sums@2")
    assert answer.status_code == 200
    async with asyncio.timeout(30):
        while (await app.get("/datasets/sums"))["dataset"]["num_rows"] != 5:
            await asyncio.sleep(0.05)
    assert (await app.api.get(f"/api/v1/datasets/{second['id']}")).status_code == 404
    third = await version(app, 7)
    assert third["version"] == 3
    assert (await app.api.delete(f"/api/v1/datasets/{first['id']}")).status_code == 200
    assert (await app.get("/datasets/sums"))["dataset"]["version"] == 3
    assert (
        await app.services.readmodel.names.find_id("dataset", "sums", scope="main")
        == first["series"]
    )
    assert (await app.api.delete("/api/v1/datasets/sums")).status_code == 200
    assert await app.services.readmodel.names.find_id("dataset", "sums", scope="main") is None
    assert (await upload(app, "sums", data(8)))["version"] == 1


async def test_a_version_that_a_run_uses_is_not_deleted(app: Application) -> None:
    await version(app, 5)
    second = await version(app, 6)
    event = await registration.find(app.services.log, app.services.readmodel.names, "sums@2")
    assert (event.dataset.dataset, event.dataset.version) == (second["id"], 2)
    requested = next(e for e in beginning("r1", "first", steps=1) if isinstance(e, RunRequested))
    await app.services.readmodel.names.take("run", "first", "r1")
    await app.append([requested.model_copy(update={"dataset": event.dataset})])
    for ref in ("sums", "sums@2", second["id"]):
        answer = await app.api.delete(f"/api/v1/datasets/{ref}")
        assert answer.status_code == 409, ref
        assert "dataset sums@2" in answer.json()["detail"]
        assert "first" in answer.json()["detail"]
    assert (await app.api.delete("/api/v1/datasets/sums@1")).status_code == 200


async def submitted(app: Application, ref: str, run: str) -> None:
    """A run and an evaluation that were submitted with a version of a dataset."""
    event = await registration.find(app.services.log, app.services.readmodel.names, ref)
    first = next(e for e in beginning(run, run, steps=1) if isinstance(e, RunRequested))
    await app.append([first.model_copy(update={"dataset": event.dataset})])
    evaluated = EvaluationRequested(
        evaluation=f"e-{run}",
        eval_name=f"e-{run}",
        template=template().model_copy(update={"dataset": event.dataset}),
        rows=(0,),
    )
    await app.append([evaluated])


async def test_a_run_and_an_evaluation_show_the_version_that_they_use(app: Application) -> None:
    first, second = await version(app, 5), await version(app, 6)
    await submitted(app, "sums@1", "one")
    await submitted(app, "sums", "two")
    await version(app, 7)
    for run, used, name in (("one", first, "sums"), ("two", second, "sums@2")):
        for path, kind in ((f"/runs/{run}", "run"), (f"/evals/e-{run}", "eval")):
            found = (await app.get(path))[kind]
            shown = (found["dataset"], found["dataset_version"], found["dataset_id"])
            assert shown == (name, used["version"], used["id"])
        assert f"<bdi>{name}</bdi>" in (await app.api.get(f"/runs/{run}")).text
    for wanted, found_runs in (("sums", {"one", "two"}), ("sums@1", {"one"}), ("sums@2", {"two"})):
        page = await app.services.readmodel.run_pages.at_offset(
            PageRange(), RunFilter(kind=RunKind(dataset=wanted))
        )
        assert {row["name"] for row in page[0]} == found_runs
    assert f"{first['id']}" in (await app.api.get("/datasets/sums@1")).text


async def test_a_parquet_file_is_shown_counted_and_returned_as_it_was_sent(
    app: Application,
) -> None:
    out = io.BytesIO()
    columns = {"user_prompt": [f"say {n}" for n in range(6)], "ground_truth": ["1"] * 6}
    parquet.write_table(pyarrow.table(columns), out)
    found = await upload(app, "sums", out.getvalue(), file_name="r.parquet")
    assert (found["status"], found["num_rows"]) == ("uploaded", 6)
    content = await app.api.get("/api/v1/datasets/sums/content")
    assert content.content == out.getvalue()
    previewed = (await app.get("/datasets/sums/preview", rows=1))["rows"]
    assert previewed[0]["prompt"][0]["content"] == "say 0"
    page = await app.api.get("/datasets/sums")
    assert page.status_code == 200
    assert "cannot be read" not in page.text
    statistics = (await app.api.get("/datasets/sums/statistics.json")).json()
    assert statistics["statistics"]["rows"] == 6


def test_the_first_version_is_written_as_datasets_were_before() -> None:
    content = ArtifactRef(uri="file:///x", sha256="0" * 64, size=1)
    old = DatasetRef(dataset="d", name="sums", content=content, num_rows=4)
    assert "version" not in old.model_dump(mode="json")
    new = old.model_copy(update={"version": 2})
    assert DatasetRef.model_validate_json(new.model_dump_json()) == new


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("sums", ("sums", None)),
        ("sums@2", ("sums", 2)),
        ("a@b@3", ("a@b", 3)),
        ("@1", ("", 1)),
        ("sums@-1", ("sums@-1", None)),
        ("sums@1234567890", ("sums@1234567890", None)),
        ("sums@\u0662", ("sums@\u0662", None)),
    ],
)
def test_a_version_follows_the_name(ref: str, expected: tuple[str, int | None]) -> None:
    assert split_version(ref) == expected
