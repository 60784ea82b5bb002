"""The dataset commands of the client: upload, overwrite, show with the first rows, download, log."""

from typing import Any

import httpx
import pytest

from infra.blobs import uploads
from tests.kit.application import Application, rows
from tests.kit.tenants import Tenant

pytestmark = pytest.mark.postgres

DATA = rows(5).encode()
CSV = b'user_prompt,ground_truth\n"Say, then\ngo",1\n' + b"".join(
    b"Say %d,%d\n" % (n, n) for n in range(5)
)


async def ask(
    app: Application, tenant: Tenant, method: str, path: str, body: Any = None
) -> httpx.Response:
    headers = {
        "Authorization": f"Bearer {tenant.api_key}",
        "X-Osmosis-Workspace": tenant.name,
    }
    return await app.api.request(method, f"/api/cli/datasets{path}", json=body, headers=headers)


async def put(app: Application, url: str, data: bytes) -> httpx.Response:
    """PUT as the client does, with neither API key nor scope."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.app)) as client:
        return await client.put(url, content=data)


async def create(
    app: Application, tenant: Tenant, name: str, data: bytes, extension: str = "jsonl", **more: Any
) -> httpx.Response:
    body = {"file_name": name, "file_size": len(data), "extension": extension, **more}
    return await ask(app, tenant, "POST", "", body)


async def upload(
    app: Application, tenant: Tenant, name: str, data: bytes, extension: str = "jsonl", **more: Any
) -> Any:
    """Upload as the client does: create, PUT each part, complete."""
    made = await create(app, tenant, name, data, extension, **more)
    assert made.status_code == 201, made.text
    plan, parts = made.json()["upload"], []
    if plan["method"] == "simple":
        assert (await put(app, plan["presigned_url"], data)).status_code == 200
    for part in plan["presigned_urls"] or ():
        start = (part["part_number"] - 1) * plan["part_size"]
        sent = await put(app, part["presigned_url"], data[start : start + part["size"]])
        etag = sent.headers["etag"].strip('"')
        parts.append({"PartNumber": part["part_number"], "ETag": etag})
    body = {"file_extension": extension} | ({"parts": parts} if parts else {})
    done = await ask(app, tenant, "POST", f"/{made.json()['id']}/complete", body)
    assert done.status_code == 200, done.text
    return done.json()


@pytest.mark.parametrize("method", ["simple", "multipart"])
async def test_a_file_is_uploaded_shown_and_downloaded(
    app: Application, ours: Tenant, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    if method == "multipart":
        monkeypatch.setattr(uploads, "part_bytes", lambda _: 100)
    done = await upload(app, ours, "sums", DATA)
    assert (done["status"], done["row_count"], done["version"]) == ("uploaded", 5, 1)
    for ref in ("sums", done["id"]):
        shown = (await ask(app, ours, "GET", f"/{ref}")).json()
        assert shown["file_name"] == "sums"
        assert shown["data_preview"][0] == {"user_prompt": "Say 0", "ground_truth": "0"}
        assert (shown["file_size"], shown["file_format"]) == (len(DATA), "jsonl")
    link = (await ask(app, ours, "GET", "/sums/download")).json()
    assert link["file_name"] == "sums.jsonl"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.app)) as client:
        assert (await client.get(link["presigned_url"])).content == DATA
    listed = (await ask(app, ours, "GET", "?limit=50&offset=0")).json()
    assert [one["file_name"] for one in listed["datasets"]].count("sums") == 1
    lines = (await ask(app, ours, "GET", "/sums/logs?limit=50&direction=older")).json()["logs"]
    assert [one["step"] for one in lines] == ["upload", "upload", "check", "store"]


async def test_csv_is_shown_with_its_own_columns(app: Application, ours: Tenant) -> None:
    done = await upload(app, ours, "table", CSV, "csv")
    assert done["status"] == "uploaded"
    assert done["data_preview"][0] == {"user_prompt": "Say, then\ngo", "ground_truth": "1"}


async def test_a_name_is_overwritten_only_on_request(app: Application, ours: Tenant) -> None:
    first = await upload(app, ours, "sums", DATA)
    refused = await create(app, ours, "sums", rows(6).encode())
    assert refused.status_code == 409
    assert refused.json()["existing_dataset_id"] == first["id"]
    more = {"overwrite_dataset_id": first["id"]}
    second = await upload(app, ours, "sums", rows(6).encode(), **more)
    assert (second["version"], second["row_count"]) == (2, 6)
    assert (await ask(app, ours, "GET", "/sums")).json()["row_count"] == 6
    assert (await ask(app, ours, "GET", f"/{first['id']}")).json()["row_count"] == 5
    other = await create(app, ours, "other", DATA, **more)
    assert other.status_code == 409
    assert "has the name sums" in other.json()["error"]
    listed = (await ask(app, ours, "GET", "")).json()["datasets"]
    assert [one["version"] for one in listed if one["file_name"] == "sums"] == [2]


async def test_a_refused_file_has_its_reasons_in_its_log(app: Application, ours: Tenant) -> None:
    done = await upload(app, ours, "bad", b'{"user_prompt": "x"}\n' * 5)
    assert done["status"] == "error"
    lines = (await ask(app, ours, "GET", "/bad/logs")).json()["logs"]
    assert any(one["level"] == "error" and "ground_truth" in one["message"] for one in lines)


async def test_an_aborted_upload_is_gone(app: Application, ours: Tenant) -> None:
    made = (await create(app, ours, "sums", DATA)).json()
    await put(app, made["upload"]["presigned_url"], DATA)
    for _ in range(2):
        ended = await ask(app, ours, "POST", f"/{made['id']}/abort", {})
        assert ended.json()["status"] == "cancelled"
    assert (await put(app, made["upload"]["presigned_url"], DATA)).status_code == 409
    done = await ask(app, ours, "POST", f"/{made['id']}/complete", {"file_extension": "jsonl"})
    assert done.status_code == 409
    assert await app.services.blobs.keys("uploads/") == []


async def test_another_workspaces_uploads_and_datasets_are_absent(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    made = (await create(app, theirs, "secret", DATA)).json()
    for method, path in (
        ("GET", ""),
        ("GET", "/logs"),
        ("GET", "/download"),
        ("POST", "/complete"),
        ("POST", "/abort"),
    ):
        for ref in (made["id"], "secret", theirs.dataset):
            body: dict[str, str] | None = {} if method == "POST" else None
            seen = await ask(app, ours, method, f"/{ref}{path}", body)
            absent = await ask(app, ours, method, f"/absent{path}", body)
            assert seen.status_code == absent.status_code == 404, (method, path)
            assert seen.text.replace(ref, "absent") == absent.text
    overwriting = await create(app, ours, "x", DATA, overwrite_dataset_id=theirs.dataset)
    assert overwriting.status_code == 404


@pytest.mark.parametrize(
    "name", ["..", "a/b", "x" * 300, "S\u00fcms", "", "a@2", "0123456789abcdef"]
)
async def test_names_that_no_dataset_may_have_are_refused(
    app: Application, ours: Tenant, name: str
) -> None:
    assert (await create(app, ours, name, DATA)).status_code == 400


@pytest.mark.parametrize("size", [0, -1, (5 << 30) + 1])
async def test_sizes_that_no_file_may_have_are_refused(
    app: Application, ours: Tenant, size: int
) -> None:
    body = {"file_name": "sums", "file_size": size, "extension": "jsonl"}
    assert (await ask(app, ours, "POST", "", body)).status_code == 400
