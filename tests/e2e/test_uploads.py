"""A dataset is uploaded in stages while the control process is killed after its parts were joined, when
its check begins, and after its version was registered."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.application import rows
from tests.kit.kills import arm, fired_points, once
from tests.kit.platform import eventually, platform
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
