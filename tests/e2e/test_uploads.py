"""A dataset is uploaded in stages while the control process is killed after its parts were joined, when
its check begins, and after its version was registered. So are a version of an artifact, and the results
of an evaluation that ran elsewhere."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.application import rows
from tests.kit.artifacts import named, task_archive
from tests.kit.kills import arm, fired_points, once
from tests.kit.local_evaluation import local_evaluation
from tests.kit.platform import eventually, git, platform
from tests.kit.s3 import fresh_bucket

pytestmark = [pytest.mark.processes, pytest.mark.postgres]

POINTS = ("upload.joined", "upload.claimed", "upload.registered")
DATA = rows(50).encode()


@pytest.fixture(params=["through the server", pytest.param("to the store", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """The settings of the blobs: below the home, or in a store that clients reach."""
    if request.param == "through the server":
        yield {}
        return
    server = request.getfixturevalue("s3")
    with fresh_bucket(server, request.getfixturevalue("s3_client")) as bucket:
        yield {
            **server.environment,
            "HEADRACE_BLOBS": f"s3://{bucket.name}/p",
            "HEADRACE_S3_PUBLIC_ENDPOINT": server.endpoint,
        }


@pytest.mark.kills
def test_kills_at_every_step_of_an_upload_make_one_version(
    tmp_path: Path, store: Mapping[str, str]
) -> None:
    environment = {**store, **arm(once(*POINTS))}
    with platform(tmp_path / "home", environment=environment) as started:
        body = {"name": "sums", "file_name": "r.jsonl", "file_size": len(DATA)}
        begun = started.api.post("/datasets", json=body).json()
        upload = begun["dataset"]["id"]
        [part] = begun["upload"]["parts"]
        assert part["url"].startswith(store.get("HEADRACE_S3_PUBLIC_ENDPOINT", started.url))
        etag = httpx.put(part["url"], content=DATA).headers["etag"]
        named = {"parts": [{"part_number": 1, "etag": etag}]}

        def completed() -> bool | None:
            try:
                answer = started.api.post(f"/datasets/{upload}/complete", json=named)
            except httpx.TransportError:
                return None
            return True if answer.status_code == 202 else None

        eventually(completed, within_s=60, what="a control process completes the upload")

        def ended() -> Any:
            try:
                found = started.api.get(f"/datasets/{upload}").json()["dataset"]
            except (httpx.TransportError, KeyError):
                return None
            return found if found["status"] in ("uploaded", "error") else None

        found = eventually(ended, within_s=120, what="another process checks the file")
        assert (found["status"], found["version"], found["num_rows"]) == ("uploaded", 1, 50)
        assert set(POINTS) <= set(fired_points(started.home))
        assert len(started.get("/datasets/sums/versions")["versions"]) == 1
        assert started.api.get("/datasets/sums/content").content == DATA
        lines = [one["message"] for one in started.get(f"/datasets/{upload}/logs")["logs"]]
        assert lines.count("the check has begun") == 2
        assert lines[-1] == "50 rows are stored as sums"


@pytest.mark.kills
def test_kills_at_every_step_of_a_publication_make_one_version(tmp_path: Path) -> None:
    points = ("artifact.joined", "artifact.checked", "artifact.stored", "artifact.published")
    data, body = task_archive(), named()
    announced = {**body, "file_size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with platform(tmp_path / "home", environment=arm(once(*points))) as started:

        def published() -> Any:
            """One try of a client, which begins from the start each time, as the command does."""
            try:
                begun = started.api.post("/artifacts/uploads", json=announced).json()
                if begun["upload"] is None:
                    return begun["artifact"]
                for part in begun["upload"]["parts"]:
                    if part["etag"] is None:
                        httpx.put(part["url"], content=data)
                answer = started.api.post(
                    "/artifacts", json={**body, "upload": begun["upload"]["id"]}
                )
            except (httpx.TransportError, KeyError):
                return None
            return answer.json()["artifact"] if answer.status_code == 201 else None

        found = eventually(published, within_s=120, what="a control process publishes the task")
        assert set(points) <= set(fired_points(started.home))
        assert found["sha256"] == announced["sha256"]
        [version] = started.get("/artifacts/task/flags/versions")["versions"]
        assert version["id"] == found["id"]
        url = started.get("/artifacts/task/flags/url")["url"]
        assert httpx.get(url).content == data
        shown = started.get("/artifacts/task/flags")["artifact"]
        assert [one["path"] for one in shown["files"]] == ["task.yaml"]


@pytest.mark.kills
def test_kills_at_every_step_of_an_import_make_one_evaluation(tmp_path: Path) -> None:
    points = ("upload.import_file", "upload.import_stored", "upload.import_appended")
    local = local_evaluation(rows(5).encode())
    with platform(tmp_path / "home", environment=arm(once(*points))) as started:
        made = started.api.post("/datasets", json={"name": "numbers", "file_name": "r.jsonl"})
        place = made.json()["upload"]["path"].removeprefix("/api/v1")
        assert started.api.put(place, content=local.dataset).status_code == 200
        repository = tmp_path / "repository"
        git(tmp_path, "init", "-q", str(repository))
        git(repository, "commit", "-q", "--allow-empty", "-m", "a commit")
        added = started.post("/workspaces", {"url": str(repository), "name": "w"})
        assert added.status_code in (201, 202), added.text

        def imported() -> Any:
            """One try of a client, which begins from the start each time, as the commands do."""
            try:
                begun = started.api.post("/evals/imports", json=local.request()).json()["import"]
                place = f"/evals/imports/{begun['id']}"
                pending = [one["path"] for one in begun["files"] if one["state"] == "pending"]
                asked = started.api.post(
                    f"{place}/uploads", json={"paths": pending or ["logs.txt"]}
                )
                for one in asked.json()["files"]:
                    for part in one["upload"]["parts"]:
                        httpx.put(part["url"], content=local.files[one["path"]])
                    sent = {"path": one["path"]}
                    started.api.post(f"{place}/uploads/complete", json=sent)
                answer = started.api.post(f"{place}/finalize", json={})
            except (httpx.TransportError, KeyError):
                return None
            return answer.json()["import"] if answer.status_code == 200 else None

        found = eventually(imported, within_s=150, what="a control process imports the results")
        assert set(points) <= set(fired_points(started.home))
        assert found["number"] == 1
        [listed] = started.get("/evals")["evals"]
        assert listed["id"] == found["eval"]
        shown = started.get(f"/evals/{found['eval']}/summary")["summary"]
        assert (shown["graded"], shown["failed"], shown["skipped"], shown["tokens"]) == (
            2,
            1,
            1,
            30,
        )
        logs = started.api.get(f"/evals/{found['eval']}/files/logs.txt")
        assert logs.content == b"it ran\n"
