"""Uploads in stages and signed URLs, over the application: what is stored, and what is refused."""

import asyncio
import hashlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest

from infra.blobs import uploads
from infra.http.failed_auth_throttle import REFUSED_AT_ONCE
from producers.core.datasets import registration
from tests.kit.application import Application, rows
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres

DATA = rows(400).encode()
PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are sent in parts of 1000 bytes, and those up to 500 bytes as a whole."""
    monkeypatch.setattr(uploads, "PART_BYTES", PART)
    monkeypatch.setattr(uploads, "WHOLE_BYTES", 500)
    monkeypatch.setattr(uploads, "part_bytes", lambda size: size if size <= 500 else PART)


async def begin(app: Application, name: str, data: bytes = DATA, **more: Any) -> Any:
    body = {"name": name, "file_name": "r.jsonl", "file_size": len(data), **more}
    answer = await app.post("/datasets", body)
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def stranger(app: Application, url: str) -> httpx.AsyncClient:
    """A client without an API key, of the application or of the store that the URL names."""
    is_ours = url.startswith("http://127.0.0.1:8420/")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app.app) if is_ours else None)


async def put(app: Application, url: str, data: Any, **headers: str) -> httpx.Response:
    """PUT without an API key."""
    async with stranger(app, url) as client:
        return await client.put(url, content=data, headers=headers)


async def fetch(app: Application, url: str, method: str = "GET", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with stranger(app, url) as client:
        return await client.request(method, url, headers=named)


async def send(app: Application, begun: Any, data: bytes = DATA) -> list[dict[str, Any]]:
    """Send all parts. Returns what `complete` names."""
    named, start = [], 0
    for part in begun["upload"]["parts"]:
        piece = data[start : start + part["size"]]
        answer = await put(app, part["url"], piece)
        assert answer.status_code == 200, answer.text
        named.append({"part_number": part["part_number"], "etag": answer.headers["etag"]})
        start += len(piece)
    assert start == len(data)
    return named


async def ended(app: Application, upload: str) -> Any:
    """The upload, or the dataset that it became, once its check has ended."""
    async with asyncio.timeout(60):
        while True:
            found = (await app.get(f"/datasets/{upload}"))["dataset"]
            if found["status"] not in ("pending", "uploading", "processing"):
                return found
            await asyncio.sleep(0.05)


async def upload(app: Application, name: str, data: bytes = DATA, **more: Any) -> Any:
    begun = await begin(app, name, data, **more)
    named = await send(app, begun, data)
    answer = await app.post(f"/datasets/{begun['dataset']['id']}/complete", {"parts": named})
    assert answer.status_code == 202, answer.text
    return await ended(app, begun["dataset"]["id"])


async def test_an_upload_in_parts_becomes_a_dataset(app: Application) -> None:
    begun = await begin(app, "sums")
    plan, identity = begun["upload"], begun["dataset"]["id"]
    assert plan["method"] == "multipart"
    assert plan["total_parts"] == -(-len(DATA) // PART) == len(plan["parts"])
    assert begun["dataset"]["status"] == "pending"
    named = await send(app, begun)
    expected = "pending" if app.services.transfers.uploads.sends_direct else "uploading"
    assert (await app.get(f"/datasets/{identity}"))["dataset"]["status"] == expected
    answer = await app.post(f"/datasets/{identity}/complete", {"parts": named})
    assert answer.json()["dataset"]["status"] == "processing"
    for _ in range(4):
        again = await app.post(f"/datasets/{identity}/complete", {"parts": named})
        assert again.status_code == 202
    found = await ended(app, identity)
    assert (found["status"], found["num_rows"], found["version"]) == ("uploaded", 400, 1)
    saved = await app.api.get("/api/v1/datasets/sums/content")
    assert saved.content == DATA
    told = [one["message"] for one in (await app.get(f"/datasets/{identity}/logs"))["logs"]]
    assert told[0] == f"r.jsonl of {len(DATA)} bytes, in {plan['total_parts']} parts"
    assert told[-1] == "400 rows are stored as sums"
    async with asyncio.timeout(30):
        while await app.services.blobs.keys("uploads/"):
            await asyncio.sleep(0.05)


async def test_a_refused_file_says_why_in_its_log(app: Application) -> None:
    found = await upload(app, "bad", b'{"user_prompt": 1}\n' * 5)
    assert found["status"] == "error"
    pages = [await app.get(f"/datasets/{found['id']}/logs", limit=1)]
    while cursor := pages[-1]["next_cursor"]:
        pages.append(await app.get(f"/datasets/{found['id']}/logs", limit=1, cursor=cursor))
    whole = await app.get(f"/datasets/{found['id']}/logs", limit=200)
    assert [page["logs"][0] for page in reversed(pages)] == whole["logs"]
    assert any("ground_truth" in one["message"] for one in whole["logs"] if one["level"] == "error")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda named: named[:-1], "is missing"),
        (lambda named: [*named, named[-1]], "each part once"),
        (lambda named: named[::-1], "in order"),
        (lambda named: [*named[:-1], {**named[-1], "etag": '"0"'}], "not "),
        (lambda _: [{"part_number": "1", "etag": 3}], "list of objects"),
        (lambda _: "parts", "list of objects"),
    ],
)
async def test_parts_that_are_named_wrongly_are_refused(
    app: Application, change: Any, said: str
) -> None:
    begun = await begin(app, "sums")
    named = await send(app, begun)
    path = f"/datasets/{begun['dataset']['id']}/complete"
    answer = await app.post(path, {"parts": change(named)})
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert (await app.post(path, {"parts": named})).status_code == 202


async def test_a_part_may_be_sent_again_and_the_last_one_counts(app: Application) -> None:
    begun = await begin(app, "sums")
    named = await send(app, begun)
    first = begun["upload"]["parts"][0]
    other = await put(app, first["url"], b" " * first["size"])
    assert other.headers["etag"] != named[0]["etag"]
    path = f"/datasets/{begun['dataset']['id']}/complete"
    assert (await app.post(path, {"parts": named})).status_code == 400
    again = await put(app, first["url"], DATA[: first["size"]])
    assert again.headers["etag"] == named[0]["etag"]
    assert (await app.post(path, {"parts": named})).status_code == 202
    assert (await ended(app, begun["dataset"]["id"]))["status"] == "uploaded"


async def test_an_interrupted_upload_goes_on_with_the_missing_parts(app: Application) -> None:
    sha256 = hashlib.sha256(DATA).hexdigest()
    begun = await begin(app, "sums", sha256=sha256)
    first = begun["upload"]["parts"][0]
    assert (await put(app, first["url"], DATA[:PART])).status_code == 200
    again = await begin(app, "sums", sha256=sha256)
    assert again["dataset"]["id"] == begun["dataset"]["id"]
    assert [part["etag"] is not None for part in again["upload"]["parts"]][:2] == [True, False]
    named = await send(app, again)
    await app.post(f"/datasets/{begun['dataset']['id']}/complete", {"parts": named})
    assert (await ended(app, begun["dataset"]["id"]))["status"] == "uploaded"
    done = await begin(app, "sums", sha256=sha256)
    assert done["upload"] is None
    assert done["dataset"]["version"] == 1


async def tampered(url: str, begun: Any) -> dict[str, tuple[str, str]]:
    """Method and URL of requests that a signed URL of a part does not allow."""
    path, query = url.split("?")
    first = begun["upload"]["parts"][0]["url"]
    last = query[:-1] + ("0" if query[-1] != "0" else "1")
    return {
        "another method": ("GET", url),
        "another part": ("PUT", first.replace("/1?", "/2?")),
        "another upload": ("PUT", f"{path[:-3]}0/1?{query}"),
        "a later time": ("PUT", f"{path}?{query.replace('until=', 'until=9')}"),
        "another length": ("PUT", f"{path}?{query.replace('length=', 'length=1')}"),
        "another key": ("PUT", f"{path}?{query.replace('key=', 'key=x')}"),
        "another byte": ("PUT", f"{path}?{last}"),
        "capitals": ("PUT", f"{path}?{query[:-64]}{query[-64:].upper()}"),
        "no signature": ("PUT", f"{path}?{query.partition('&signature')[0]}"),
        "more": ("PUT", f"{url}&x=1"),
        "no query": ("PUT", path),
    }


async def test_a_signed_url_allows_one_request(app: Application) -> None:
    begun = await begin(app, "sums")
    url = begun["upload"]["parts"][1]["url"]
    for what, (method, changed) in (await tampered(url, begun)).items():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app.app)) as client:
            answer = await client.request(method, changed, content=DATA[PART : 2 * PART])
        assert answer.status_code == 403, what
        assert answer.json()["code"] == "SIGNED_URL", what
    for data in (b"", DATA[:10], DATA[: PART + 1]):
        answer = await put(app, url, data)
        assert answer.status_code == 400
        assert "exactly 1000 bytes" in answer.json()["detail"]

    async def chunks() -> Any:
        yield DATA[:PART]
        yield b"x"

    answer = await put(app, url, chunks())
    assert answer.status_code == 400
    assert await app.services.blobs.keys("uploads/") == []


async def test_without_the_check_a_changed_url_would_be_allowed(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the refusals above come from the signature."""
    monkeypatch.setattr("infra.identity.signed_urls.hmac.compare_digest", lambda *_: True)
    begun = await begin(app, "sums")
    url = begun["upload"]["parts"][1]["url"]
    changed = (await tampered(url, begun))["another byte"][1]
    assert (await put(app, changed, DATA[PART : 2 * PART])).status_code == 200


async def test_a_signed_url_ends_with_its_time_and_its_key(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await create_api_key(app, "ci", "submit")
    body = {"name": "sums", "file_name": "r.jsonl", "file_size": 400}
    answer = await ask(app, "POST", "/api/v1/datasets", key, json=body)
    url = answer.json()["upload"]["parts"][0]["url"]
    assert (await put(app, url, b"x" * 400)).status_code == 200
    now = app.services.clock.now()
    monkeypatch.setattr(app.services.clock, "now", lambda: now + timedelta(hours=13))
    assert "has expired" in (await put(app, url, b"x" * 400)).json()["detail"]
    monkeypatch.undo()
    await app.api.delete("/api/v1/api-keys/ci")
    answer = await put(app, url, b"x" * 400)
    assert answer.status_code == 403
    assert "was revoked" in answer.json()["detail"]


@pytest.mark.parametrize("size", [1.5, True, "400", None, -1, 0, 6 << 30])
async def test_a_size_is_a_whole_number_of_bytes(app: Application, size: object) -> None:
    body = {"name": "sums", "file_name": "r.jsonl", "file_size": size}
    assert (await app.post("/datasets", body)).status_code == 400


async def test_a_signed_url_ends_with_the_secret_of_its_key(app: Application) -> None:
    key = await create_api_key(app, "ci", "submit")
    body = {"name": "sums", "file_name": "r.jsonl", "file_size": 400}
    answer = await ask(app, "POST", "/api/v1/datasets", key, json=body)
    url = answer.json()["upload"]["parts"][0]["url"]
    assert (await app.post("/api-keys/ci/rotate", {"overlap_s": 3600})).status_code == 200
    assert (await put(app, url, b"x" * 400)).status_code == 200, "the old secret overlaps"
    assert (await app.post("/api-keys/ci/rotate", {"overlap_s": 0})).status_code == 200
    answer = await put(app, url, b"x" * 400)
    assert answer.status_code == 403
    assert "has a new secret" in answer.json()["detail"]


async def test_a_url_of_an_old_secret_does_not_outlive_it(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await create_api_key(app, "ci", "submit")
    assert (await app.post("/api-keys/ci/rotate", {"overlap_s": 3600})).status_code == 200
    body = {"name": "sums", "file_name": "r.jsonl", "file_size": 400}
    answer = await ask(app, "POST", "/api/v1/datasets", key, json=body)
    url = answer.json()["upload"]["parts"][0]["url"]
    assert (await put(app, url, b"x" * 400)).status_code == 200
    now = app.services.clock.now()
    monkeypatch.setattr(app.services.clock, "now", lambda: now + timedelta(minutes=61))
    assert "has expired" in (await put(app, url, b"x" * 400)).json()["detail"]


async def test_a_signed_url_of_the_root_key_ends_with_its_text(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (await begin(app, "sums"))["upload"]["parts"][0]["url"]
    assert (await put(app, url, DATA[:PART])).status_code == 200
    monkeypatch.setattr(type(app.services.settings), "read_api_key", lambda _: "another-root-key")
    assert (await put(app, url, DATA[:PART])).status_code == 403


async def test_signed_urls_are_audited_and_never_count_as_strangers(app: Application) -> None:
    begun = await begin(app, "sums")
    url = begun["upload"]["parts"][0]["url"]
    for _ in range(int(4 * REFUSED_AT_ONCE)):
        await put(app, url + "0", b"")
    assert not app.services.throttle.must_leave("127.0.0.1")
    await put(app, url, DATA[:PART])
    await app.services.audit.flush(everything=True)
    entries = (await app.get("/audit"))["audit"]
    used = [(one["api_key"], one["allowed"]) for one in entries if one["method"] == "PUT"]
    assert ("root", True) in used
    assert (None, False) in used


async def test_without_the_check_of_the_length_another_one_would_be_stored(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the refusals of other lengths come from the count of the bytes."""
    begun = await begin(app, "sums")

    async def chunks() -> Any:
        yield DATA[:PART]
        yield b"x"

    assert (await put(app, begun["upload"]["parts"][1]["url"], chunks())).status_code == 400
    monkeypatch.setattr(uploads, "_exactly", lambda body, size: body)
    assert (await put(app, begun["upload"]["parts"][1]["url"], chunks())).status_code == 200
    [stored] = await app.services.blobs.keys("uploads/")
    assert stored.size == PART + 1


async def test_parts_that_nobody_completes_are_collected(app: Application) -> None:
    begun = await begin(app, "sums")
    await put(app, begun["upload"]["parts"][0]["url"], DATA[:PART])
    orphan = await app.services.blobs.put_blob("uploads/gone/1.x", b"x")
    store, now = app.services.transfers.uploads, app.services.clock.now()
    assert await store.collect(now=now + timedelta(hours=20)) == 0
    assert len(await app.services.blobs.keys("uploads/")) == 2
    assert await store.collect(now=now + timedelta(days=3)) == 1
    assert await app.services.blobs.keys("uploads/") == []
    assert orphan.endswith("uploads/gone/1.x")
    answer = await put(app, begun["upload"]["parts"][1]["url"], DATA[PART : 2 * PART])
    assert answer.status_code == 404


async def test_an_upload_that_is_deleted_during_its_check_becomes_no_dataset(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = await begin(app, "sums")
    identity, check = begun["dataset"]["id"], registration.check
    reached, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **named: Any) -> Any:
        found = await check(*arguments, **named)
        reached.set()
        await goes_on.wait()
        return found

    named = await send(app, begun)
    with monkeypatch.context() as patch:  # undone before the application undoes its own
        patch.setattr(registration, "check", slow)
        await app.post(f"/datasets/{identity}/complete", {"parts": named})
        await reached.wait()
    assert (await app.api.delete(f"/api/v1/datasets/{identity}")).status_code == 200
    goes_on.set()
    async with asyncio.timeout(30):
        while await app.services.blobs.keys("uploads/"):
            await asyncio.sleep(0.02)
    assert (await app.api.get("/api/v1/datasets/sums")).status_code == 404
    assert (await app.get("/datasets"))["datasets"] == []


async def test_urls_have_the_path_of_a_proxy_and_work_without_it(app: Application) -> None:
    proxied = replace(app.services.settings, public_url="https://proxy.example/team/headrace")
    app.app.state.services = replace(app.services, settings=proxied)
    begun = await begin(app, "sums")
    prefix, named = "https://proxy.example/team/headrace", []
    for part, start in zip(begun["upload"]["parts"], range(0, len(DATA), PART), strict=True):
        assert part["url"].startswith(f"{prefix}/api/v1/transfers/uploads/")
        own = part["url"].replace(prefix, "http://127.0.0.1:8420")
        answer = await put(app, own, DATA[start : start + PART])
        assert answer.status_code == 200
        named.append({"part_number": part["part_number"], "etag": answer.headers["etag"]})
    await app.post(f"/datasets/{begun['dataset']['id']}/complete", {"parts": named})
    assert (await ended(app, begun["dataset"]["id"]))["status"] == "uploaded"
    assert (await app.get("/datasets/sums/url"))["url"].startswith(f"{prefix}/api/v1/transfers/")
    await app.app.state.services.dataset_uploads.close()


async def test_a_file_is_read_by_ranges(app: Application) -> None:
    await upload(app, "sums")
    url = (await app.get("/datasets/sums/url"))["url"]
    whole = await fetch(app, url)
    assert (whole.status_code, whole.content) == (200, DATA)
    etag, size = whole.headers["etag"], len(DATA)
    for asked, expected in (
        ("bytes=0-9", DATA[:10]),
        ("bytes=10-", DATA[10:]),
        ("bytes=-7", DATA[-7:]),
        (f"bytes=5-{size + 5}", DATA[5:]),
    ):
        part = await fetch(app, url, Range=asked, If_Range=etag)
        assert (part.status_code, part.content) == (206, expected)
        start = 0 if expected == DATA[:10] else size - len(expected)
        assert part.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/{size}"
    assert (await fetch(app, url, Range="bytes=0-9", If_Range='"other"')).content == DATA
    for none in (f"bytes={size}-", "bytes=-0"):
        answer = await fetch(app, url, Range=none)
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{size}"
    for other in ("bytes=3-1", "bytes=0-1,4-5", "lines=1-2", "bytes=-"):
        assert (await fetch(app, url, Range=other)).status_code == 200
    head = await fetch(app, url, "HEAD")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(size), b"")


async def test_a_file_is_checked_on_behalf_of_its_sender_whoever_wakes_the_check(
    app: Application,
) -> None:
    """Also one that is refused before it is read, because its check ended the server too often."""
    keys = [
        await create_api_key(app, name, "submit", owner=f"owner-of-{name}") for name in ("a", "b")
    ]
    uploads_begun = []
    for number, key in enumerate(keys):
        body = {"name": f"d{number}", "file_name": "r.jsonl", "file_size": len(DATA)}
        answer = await ask(app, "POST", "/api/v1/datasets", key, json=body)
        uploads_begun.append(answer.json())
        await send(app, uploads_begun[-1])
    stuck, own = (one["dataset"]["id"] for one in uploads_begun)
    pool = app.database.durable
    await pool.execute("update uploads set status = 'complete' where id = $1", stuck)
    await pool.execute(
        "update dataset_uploads set status = 'processing', attempts = 9 where id = $1", stuck
    )
    await ask(app, "POST", f"/api/v1/datasets/{own}/complete", keys[1], json={})
    assert (await ended(app, stuck))["status"] == "error"
    uploader = await pool.fetchval("select uploader from dataset_uploads where id = $1", stuck)
    assert uploader == "owner-of-a"
    await ended(app, own)
