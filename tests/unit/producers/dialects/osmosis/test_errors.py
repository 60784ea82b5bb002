"""Every refusal below /api/cli in the form of the client: by the guard, the router, the scope
headers and the routes."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.settings.settings import BadSetting, Settings
from producers.http.app import create_app
from producers.serve import dialects_of
from schemas.errors import QuotaExceeded, TransientError
from tests.kit.application import API_KEY, Application
from tests.kit.tenants import Tenant, create_api_key

pytestmark = pytest.mark.postgres

LIST = "/api/cli/training-runs"


async def ask(
    app: Application, path: str, *headers: tuple[str, str], method: str = "GET", key: str = API_KEY
) -> httpx.Response:
    """The response to a request with these headers, which may repeat. Without `key` it has no API
    key."""
    credential = [("Authorization", f"Bearer {key}")] if key else []
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=app.api.base_url) as client:
        sent = [(name.encode(), value.encode("latin-1")) for name, value in (*headers, *credential)]
        return await client.request(method, path, headers=sent)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in a response, which has a text and a code as the client reads them."""
    assert answer.headers["content-type"] == "application/json", answer.text
    assert answer.headers["x-osmosis-version-status"] == "current"
    found: dict[str, Any] = answer.json()
    assert isinstance(found["error"], str)
    assert isinstance(found["code"], str)
    return found


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ((), 400, "GIT_SCOPE_HEADER_REQUIRED"),
        ((("X-Osmosis-Git", "acme/ours"), ("X-Osmosis-Workspace", "ours")), 400, "CONFLICT"),
        ((("X-Osmosis-Git", "ours"),), 400, "GIT_SCOPE_HEADER_INVALID"),
        ((("X-Osmosis-Git", "acme/../ours"),), 400, "GIT_SCOPE_HEADER_INVALID"),
        ((("X-Osmosis-Git", "acme/.."),), 400, "GIT_SCOPE_HEADER_INVALID"),
        ((("X-Osmosis-Git", ""),), 400, "GIT_SCOPE_HEADER_INVALID"),
        ((("X-Osmosis-Git", "a/" + "b" * 300),), 400, "GIT_SCOPE_HEADER_INVALID"),
        ((("X-Osmosis-Git", "acm\u00e9/ours"),), 400, "GIT_SCOPE_HEADER_INVALID"),
        (
            (("X-Osmosis-Git", "acme/ours"), ("X-Osmosis-Git", "acme/theirs")),
            400,
            "GIT_SCOPE_HEADER_INVALID",
        ),
        ((("X-Osmosis-Git", "acme/absent"),), 404, "GIT_REPOSITORY_NOT_CONNECTED"),
        ((("X-Osmosis-Git", "acme/theirs"),), 404, "GIT_REPOSITORY_NOT_CONNECTED"),
        ((("X-Osmosis-Workspace", "absent"),), 404, "WORKSPACE_SCOPE_HEADER_ACCESS_DENIED"),
        ((("X-Osmosis-Workspace", "theirs"),), 404, "WORKSPACE_SCOPE_HEADER_ACCESS_DENIED"),
        ((("X-Osmosis-Workspace", "../x"),), 404, "WORKSPACE_SCOPE_HEADER_ACCESS_DENIED"),
        ((("X-Osmosis-Workspace", "ours"),), 200, ""),
        ((("X-Osmosis-Git", "acme/ours"),), 200, ""),
        ((("X-Osmosis-Git", "Acme/OURS"),), 200, ""),
    ],
)
async def test_a_request_names_one_workspace_that_its_key_sees(
    app: Application,
    ours: Tenant,
    theirs: Tenant,
    headers: tuple[tuple[str, str], ...],
    status: int,
    code: str,
) -> None:
    del theirs
    answer = await ask(app, LIST, *headers, key=ours.api_key)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert code in error_of(answer)["code"]
        assert "theirs" not in answer.text.replace("acme/theirs", "").replace("'theirs'", "")


async def test_a_workspace_that_a_key_does_not_see_is_answered_like_an_absent_one(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    for name, there, absent in (
        ("X-Osmosis-Git", "acme/theirs", "acme/absent"),
        ("X-Osmosis-Workspace", theirs.name, "absent"),
        ("X-Osmosis-Workspace", theirs.workspace, "absent"),
    ):
        seen = await ask(app, LIST, (name, there), key=ours.api_key)
        unseen = await ask(app, LIST, (name, absent), key=ours.api_key)
        assert seen.status_code == unseen.status_code == 404
        assert seen.text.replace(there, absent) == unseen.text


async def test_a_list_holds_the_runs_of_the_named_workspace_alone(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    """The root key sees both workspaces, and the header chooses one."""
    for named in (ours, theirs):
        answer = await ask(app, LIST, ("X-Osmosis-Workspace", named.name))
        assert [run["name"] for run in answer.json()["training_runs"]] == [named.run_name]
        assert answer.json()["total_count"] == 1


async def test_refusals_of_the_guard_have_the_form_of_the_client(
    app: Application, ours: Tenant
) -> None:
    scope = ("X-Osmosis-Git", "acme/ours")
    unsigned = await ask(app, LIST, scope, key="")
    assert (unsigned.status_code, error_of(unsigned)["code"]) == (401, "AUTH_HEADER_MISSING")
    unknown = await ask(app, LIST, scope, key="headrace_no")
    assert (unknown.status_code, error_of(unknown)["code"]) == (401, "TOKEN_INVALID")
    foreign = await ask(app, LIST, scope, ("Host", "evil.example"))
    assert (foreign.status_code, error_of(foreign)["code"]) == (421, "UNKNOWN_HOST")
    reader = await create_api_key(app, "measures", "metrics")
    refused = await ask(app, LIST, scope, key=reader)
    assert (refused.status_code, error_of(refused)["code"]) == (403, "FORBIDDEN")
    assert "subscription" not in refused.text.lower()
    for answer in (unsigned, unknown, foreign):
        assert answer.headers["connection"] == "close"


async def test_unknown_paths_and_methods_have_the_form_of_the_client(app: Application) -> None:
    for path in ("/api/cli", "/api/cli/", "/api/cli/benchmarks", "/api/cli/benchmark-runs/a/logs"):
        answer = await ask(app, path)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "NOT_FOUND"), path
    answer = await ask(app, LIST, method="PATCH")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "METHOD")
    assert answer.headers["allow"]
    native = await ask(app, "/api/v1/absent")
    assert native.headers["content-type"] == "application/problem+json"


async def test_an_unexpected_error_is_answered_without_its_text(
    app: Application, ours: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> object:
        raise RuntimeError("a private detail")

    monkeypatch.setattr(app.services.readmodel.run_pages, "at_offset", fail)
    answer = await ask(app, LIST, ("X-Osmosis-Git", "acme/ours"))
    assert (answer.status_code, error_of(answer)["code"]) == (500, "INTERNAL")
    assert "private" not in answer.text


@pytest.mark.parametrize("query", ["limit=51", "limit=0", "limit=x", "limit=-1", "offset=-1"])
async def test_a_page_out_of_range_is_refused(app: Application, ours: Tenant, query: str) -> None:
    answer = await ask(app, f"{LIST}?{query}", ("X-Osmosis-Git", "acme/ours"))
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "VALIDATION")
    assert error["issues"][0]["key"] == query.split("=")[0]
    assert json.dumps(error["issues"][0]["message"])


async def test_a_quota_and_an_outage_say_when_to_ask_again(
    app: Application, ours: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def over(_: object) -> None:
        raise QuotaExceeded("too many requests", retry_s=7.2)

    async def away(*_: object, **__: object) -> None:
        raise TransientError("the database does not answer now")

    scope = ("X-Osmosis-Git", "acme/ours")
    with monkeypatch.context() as patch:
        patch.setattr(app.services.quotas, "count_request", over)
        limited = await ask(app, LIST, scope, key=ours.api_key)
    assert (limited.status_code, error_of(limited)["code"]) == (429, "QUOTA_EXCEEDED")
    assert limited.headers["retry-after"] == "8"
    monkeypatch.setattr(app.services.readmodel.run_pages, "at_offset", away)
    outage = await ask(app, LIST, scope)
    assert (outage.status_code, error_of(outage)["code"]) == (503, "UNAVAILABLE")
    assert int(outage.headers["retry-after"]) >= 1


def test_a_setting_turns_the_dialect_off(tmp_path: Path) -> None:
    def dialects(**more: str) -> int:
        return len(dialects_of(Settings.load({"HEADRACE_HOME": str(tmp_path), **more})))

    assert dialects() == dialects(HEADRACE_OSMOSIS_API="on") == 1
    assert dialects(HEADRACE_OSMOSIS_API="off") == 0
    for name, value in (("HEADRACE_OSMOSIS_API", "no"), ("HEADRACE_OSMOSIS_OLDEST", "new")):
        with pytest.raises(BadSetting, match=name):
            dialects(**{name: value})


async def test_nothing_is_served_where_the_dialect_is_off(app: Application) -> None:
    bare = create_app(app.services)
    transport = httpx.ASGITransport(bare, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url=app.api.base_url) as client:
        answer = await client.get("/api/cli/verify", headers=headers)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
