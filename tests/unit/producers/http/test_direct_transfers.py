"""Uploads and downloads straight to and from a real S3 store: what its URLs allow, and what is kept of
what they bring. The tests of the server's own URLs that hold for both are run again."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from infra.blobs import uploads
from infra.blobs.s3.direct import S3Direct
from infra.blobs.uploads import FORGOTTEN
from infra.identity.quotas import Quotas
from producers.core.datasets import transfers
from schemas.errors import QuotaExceeded
from tests.kit.application import Application, application
from tests.kit.s3 import Bucket
from tests.unit.producers.http.test_transfers import (
    DATA,
    PART,
    begin,
    ended,
    fetch,
    put,
    send,
    small_parts,
    test_a_part_may_be_sent_again_and_the_last_one_counts,
    test_a_refused_file_says_why_in_its_log,
    test_an_interrupted_upload_goes_on_with_the_missing_parts,
    test_an_upload_in_parts_becomes_a_dataset,
    test_parts_that_are_named_wrongly_are_refused,
    upload,
)

__all__ = [
    "small_parts",
    "test_a_part_may_be_sent_again_and_the_last_one_counts",
    "test_a_refused_file_says_why_in_its_log",
    "test_an_interrupted_upload_goes_on_with_the_missing_parts",
    "test_an_upload_in_parts_becomes_a_dataset",
    "test_parts_that_are_named_wrongly_are_refused",
]

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


@pytest.fixture
async def app(database_url: str, tmp_path: Path, bucket: Bucket) -> AsyncIterator[Application]:
    async with application(
        database_url, tmp_path / "home", store=bucket.public_blobs("pre/fix")
    ) as served:
        yield served


def of_store(app: Application) -> S3Direct:
    found = app.services.blobs.direct
    assert isinstance(found, S3Direct)
    return found


async def complete(app: Application, begun: Any, named: Any) -> Any:
    return await app.post(f"/datasets/{begun['dataset']['id']}/complete", {"parts": named})


async def test_urls_are_those_of_the_store_and_name_no_secret(
    app: Application, bucket: Bucket
) -> None:
    begun = await begin(app, "sums")
    folder = f"/{bucket.name}/pre/fix/uploads/direct/main/{begun['dataset']['id']}/"
    assert begun["upload"]["expires_in"] == 3600
    for part in begun["upload"]["parts"]:
        place = urlsplit(part["url"])
        query = parse_qs(place.query)
        assert part["url"].startswith(bucket.server.endpoint)
        assert place.path == f"{folder}{part['part_number']}"
        assert query["X-Amz-Expires"] == ["3600"]
        assert "content-length" in query["X-Amz-SignedHeaders"][0].split(";")
        assert bucket.server.secret_key not in part["url"]


async def test_a_url_of_the_store_allows_one_request(app: Application) -> None:
    begun = await begin(app, "sums")
    first, second = (part["url"] for part in begun["upload"]["parts"][:2])
    data = DATA[:PART]

    async def streamed() -> AsyncIterator[bytes]:
        yield data + b"x"

    for body in (b"", data[:-1], data + b"x", streamed()):
        assert (await put(app, first, body)).status_code in (400, 403, 411)
    for header in ("x-amz-acl", "x-amz-meta-a", "x-amz-tagging", "x-amz-copy-source"):
        assert (await put(app, first, data, **{header: "public-read"})).status_code in (400, 403)
    other = first.replace("/1?", "/2?")
    later = first.replace("X-Amz-Expires=3600", "X-Amz-Expires=36000")
    for url in (other, later, first[:-1] + ("0" if first[-1] != "0" else "1"), first.split("?")[0]):
        assert (await put(app, url, data)).status_code == 403
    for method in ("GET", "DELETE", "HEAD", "POST"):
        assert (await fetch(app, first, method)).status_code in (400, 403, 405)
    assert await of_store(app).list_sent("uploads/") == {}
    assert (await put(app, second, DATA[PART : 2 * PART])).status_code == 200


async def test_a_url_whose_length_is_not_signed_lets_a_longer_body_in_and_it_does_not_count(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the signed length. The size is checked again when the upload is completed."""
    signed = S3Direct._sign

    def unbound(self: S3Direct, operation: str, for_s: int, **parameters: object) -> str:
        parameters.pop("ContentLength", None)
        return signed(self, operation, for_s, **parameters)

    monkeypatch.setattr(S3Direct, "_sign", unbound)
    begun = await begin(app, "sums", DATA[:400])
    [part] = begun["upload"]["parts"]
    answer = await put(app, part["url"], DATA[:401])
    assert answer.status_code == 200
    refused = await complete(app, begun, [{"part_number": 1, "etag": answer.headers["etag"]}])
    assert refused.status_code == 400
    assert "has not arrived" in refused.json()["detail"]


async def test_a_url_of_the_store_expires(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "DIRECT_UPLOAD_S", 1)
    begun = await begin(app, "sums", DATA[:400])
    url = begun["upload"]["parts"][0]["url"]
    await asyncio.sleep(1.2)
    refused = await put(app, url, DATA[:400])
    assert refused.status_code == 403
    assert "expired" in refused.text


async def test_a_large_upload_has_time_for_all_its_parts(app: Application) -> None:
    body = {"name": "big", "file_name": "r.jsonl", "file_size": 5 << 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "part_bytes", lambda _: 1 << 30)
        begun = (await app.post("/datasets", body)).json()
    assert begun["upload"]["expires_in"] == 5 << 10


async def test_a_part_that_is_replaced_after_the_upload_was_completed_is_not_read(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = await begin(app, "sums")
    named = await send(app, begun)
    first = begun["upload"]["parts"][0]["url"]
    monkeypatch.setattr(app.services.dataset_uploads, "wake", lambda: None)
    assert (await complete(app, begun, named)).status_code == 202
    assert (await put(app, first, DATA[:PART][::-1])).status_code == 200
    monkeypatch.undo()
    app.services.dataset_uploads.wake()
    found = await ended(app, begun["dataset"]["id"])
    assert (found["status"], "was replaced" in found["error"]) == ("error", True)


async def test_without_the_etag_a_replaced_part_would_be_read(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the refusal above comes from the ETag."""
    read = S3Direct._read
    monkeypatch.setattr(
        S3Direct,
        "_read",
        lambda self, **where: read(self, **{k: v for k, v in where.items() if k != "IfMatch"}),
    )
    begun = await begin(app, "sums")
    named = await send(app, begun)
    with monkeypatch.context() as asleep:
        asleep.setattr(app.services.dataset_uploads, "wake", lambda: None)
        assert (await complete(app, begun, named)).status_code == 202
    changed = DATA[:PART].replace(b"0", b"1")
    assert (await put(app, begun["upload"]["parts"][0]["url"], changed)).status_code == 200
    app.services.dataset_uploads.wake()
    assert (await ended(app, begun["dataset"]["id"]))["status"] == "uploaded"


async def test_a_url_writes_only_what_was_not_registered(app: Application) -> None:
    begun = await begin(app, "sums")
    await complete(app, begun, await send(app, begun))
    assert (await ended(app, begun["dataset"]["id"]))["status"] == "uploaded"
    late = await put(app, begun["upload"]["parts"][0]["url"], b" " * PART)
    assert late.status_code == 200
    url = (await app.get("/datasets/sums/url"))["url"]
    assert (await fetch(app, url)).content == DATA
    await app.services.transfers.uploads.collect(now=datetime.now(UTC) + 2 * FORGOTTEN)
    assert await of_store(app).list_sent("uploads/") == {}


async def test_a_file_that_is_not_the_declared_one_is_refused(app: Application) -> None:
    begun = await begin(app, "sums", sha256=hashlib.sha256(b"other").hexdigest())
    await complete(app, begun, await send(app, begun))
    found = await ended(app, begun["dataset"]["id"])
    assert found["status"] == "error"
    assert "has the sha256" in found["error"]


async def test_a_file_is_read_from_the_store_by_ranges(app: Application, bucket: Bucket) -> None:
    await upload(app, "sums")
    link = await app.get("/datasets/sums/url")
    assert link["url"].startswith(bucket.server.endpoint)
    assert link["expires_in"] == 900
    whole = await fetch(app, link["url"])
    assert (whole.status_code, whole.content) == (200, DATA)
    assert whole.headers["content-disposition"] == "attachment; filename*=utf-8''r.jsonl"
    part = await fetch(app, link["url"], Range="bytes=5-9")
    assert (part.status_code, part.content) == (206, DATA[5:10])
    for method in ("PUT", "DELETE"):
        assert (await fetch(app, link["url"], method)).status_code == 403
    other = link["url"].replace("/datasets/", "/others/")
    assert (await fetch(app, other)).status_code == 403


async def test_the_declared_size_counts_for_the_quota(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    async def take(self: Quotas, actor: object, count: int) -> None:
        taken.append(count)
        if count > 5000:
            raise QuotaExceeded("enough", retry_s=60.0)

    monkeypatch.setattr(Quotas, "take_bytes", take)
    await begin(app, "sums", b"x" * 4000)
    refused = await app.post(
        "/datasets", {"name": "more", "file_name": "r.jsonl", "file_size": 6000}
    )
    assert refused.status_code == 429
    assert taken == [4000, 6000]


async def test_abandoned_parts_at_the_store_are_collected(app: Application, bucket: Bucket) -> None:
    aborted, left = await begin(app, "sums"), await begin(app, "left")
    for begun in (aborted, left):
        await put(app, begun["upload"]["parts"][0]["url"], DATA[:PART])
    answer = await app.post(f"/datasets/{aborted['dataset']['id']}/abort", {})
    assert answer.status_code == 200
    [kept] = await of_store(app).list_sent("uploads/")
    assert left["dataset"]["id"] in kept
    bucket.client.create_multipart_upload(Bucket=bucket.name, Key="pre/fix/runs/x")
    await app.services.transfers.uploads.collect()
    assert len(bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]) == 1
    await app.services.transfers.uploads.collect(now=datetime.now(UTC) + timedelta(days=3))
    assert await of_store(app).list_sent("uploads/") == {}
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
