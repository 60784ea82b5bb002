"""Which callers may use the API, and which errors other callers get."""

from typing import Any

import httpx
import pytest

from tests.kit.application import API_KEY, Application

pytestmark = pytest.mark.postgres


async def test_everything_but_health_needs_the_api_key(app: Application) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await app.api.get(path, headers={"Authorization": ""})).status_code == 200
    for headers in (
        {"Authorization": ""},
        {"Authorization": "Bearer no"},
        {"Authorization": API_KEY},
    ):
        for path in ("/api/v1/runs", "/metrics", "/api/v1/nothing"):
            refused = await app.api.get(path, headers=headers)
            assert refused.status_code == 401
            assert "API key" in refused.json()["detail"]
            is_told = "that was sent is not known" in refused.json()["detail"]
            assert is_told == (headers["Authorization"] == "Bearer no")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8420", 200),
        ("localhost:1", 200),
        ("[::1]:8420", 200),
        ("127.0.0.1", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8420", 421),
        ("", 421),
    ],
)
async def test_an_unknown_host_is_refused(app: Application, host: str, status: int) -> None:
    answer = await app.api.get("/api/v1/runs", headers={"Host": host})
    assert answer.status_code == status


async def test_mistakes_are_problem_documents(app: Application) -> None:
    for path, status in (
        ("/api/v1/nothing", 404),
        ("/api/v1/runs/nobody", 404),
        ("/api/v1/runs?limit=x", 400),
        ("/api/v1/runs?limit=0", 400),
        ("/api/v1/runs?status=odd", 400),
        ("/api/v1/datasets/none", 404),
        ("/api/v1/workspaces/none", 404),
        ("/api/v1/evals/none", 404),
        ("/api/v1/checkpoints/none", 404),
        ("/api/v1/runs/a%00b", 400),
    ):
        answer = await app.api.get(path)
        assert answer.status_code == status, path
        assert answer.headers["content-type"] == "application/problem+json"
        document = answer.json()
        assert {"type", "title", "status", "detail", "code", "issues"} == set(document)
        assert document["status"] == status
    wrong = await app.api.request("PATCH", "/api/v1/runs")
    assert wrong.status_code == 405


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"config": 1}', "config"),
        (b'{"confg": {}}', "confg"),
        (b'{"config": {}, "dry_run": 1}', "dry_run"),
        (b'{"config": {"a": NaN}}', "NaN"),
        (b" " * (2 << 20), "bytes"),
        (b"[" * 100_000, "not JSON"),
    ],
)
async def test_bodies_are_bounded_json_objects(app: Application, content: bytes, says: str) -> None:
    answer = await app.api.post("/api/v1/runs", content=content)
    assert answer.status_code == 400
    assert says in answer.text


async def test_a_database_that_is_away_is_a_503(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: Any) -> None:
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(app.services.readmodel.platform, "alive", broken)
    answer = await app.api.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["code"] == "UNAVAILABLE"


async def test_a_key_of_idempotency_is_plain_text(app: Application) -> None:
    answer = await app.post("/runs", {"config": {}}, Idempotency_Key="a b")
    assert answer.status_code == 400
    assert isinstance(answer, httpx.Response)
