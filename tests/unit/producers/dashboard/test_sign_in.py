"""Signing in: who gets a session, how long it lasts, and what other sites cannot do with it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from infra.identity.api_key_format import digest
from infra.identity.sessions import Bearer
from infra.ports.actor import ROOT
from tests.kit.application import API_KEY, Application
from tests.kit.signed_in import HERE, form_key_in, sign_in, signed_in
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """A client without an API key, which keeps cookies and says where its requests come from."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        yield client


async def test_a_page_without_a_session_leads_to_the_form_and_back(
    browser: httpx.AsyncClient,
) -> None:
    asked = await browser.get("/runs/some-run?range=6h")
    assert (asked.status_code, asked.headers["location"]) == (
        303,
        "/login?next=/runs/some-run%3Frange%3D6h",
    )
    form = await browser.get(asked.headers["location"])
    assert 'value="/runs/some-run?range=6h"' in form.text
    entered = await sign_in(browser, API_KEY, "/runs/some-run?range=6h")
    assert entered.headers["location"] == "/runs/some-run?range=6h"
    assert (await browser.get("/")).status_code == 200


async def test_a_wrong_api_key_opens_nothing(browser: httpx.AsyncClient) -> None:
    for text in ("", "wrong", API_KEY + "x", "hr_0000000000_" + "A" * 49):
        refused = await sign_in(browser, text)
        assert refused.status_code == 401
        assert "not a valid API key" in refused.text
        assert "set-cookie" not in refused.headers
    assert (await browser.get("/")).status_code == 303


@pytest.mark.parametrize(
    "outside", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1", "x"]
)
async def test_the_form_leads_nowhere_else(browser: httpx.AsyncClient, outside: str) -> None:
    assert (await sign_in(browser, API_KEY, outside)).headers["location"] == "/"


async def test_the_cookie_is_hidden_from_scripts_and_is_not_in_the_database(
    app: Application, browser: httpx.AsyncClient
) -> None:
    entered = await sign_in(browser, API_KEY)
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    value = cookie.partition("=")[2].partition(";")[0]
    rows = await app.database.durable.fetch("select s::text from browser_sessions s")
    assert len(rows) == 1
    assert value not in str(rows)
    assert API_KEY not in str(rows)


async def test_a_session_is_not_for_the_api(browser: httpx.AsyncClient) -> None:
    await sign_in(browser, API_KEY)
    assert (await browser.get("/api/v1/runs")).status_code == 401


async def test_a_session_ends_with_its_api_key(
    app: Application, browser: httpx.AsyncClient
) -> None:
    api_key = await create_api_key(app, "ada", "read")
    await sign_in(browser, api_key)
    assert (await browser.get("/")).status_code == 200
    revoked = await app.api.delete("/api/v1/api-keys/ada")
    assert revoked.status_code == 200
    assert (await browser.get("/")).status_code == 303


async def test_signing_out_ends_the_session_also_for_a_copy_of_the_cookie(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await sign_in(browser, API_KEY)
    copied = dict(browser.cookies)
    key = form_key_in((await browser.get("/")).text)
    left = await browser.post("/logout", data={"form_key": key})
    assert left.headers["location"] == "/login"
    browser.cookies.update(copied)
    assert (await browser.get("/")).status_code == 303


async def test_a_code_opens_one_session(app: Application, browser: httpx.AsyncClient) -> None:
    code = await app.services.sessions.issue_code(Bearer(ROOT, digest(API_KEY)))
    for _ in range(2):  # to look at it opens nothing, and does not use it up
        offered = await browser.get("/login", params={"code": code})
        assert offered.status_code == 200
        assert "Sign in as admin" in offered.text
        assert (await browser.get("/")).status_code == 303
    entered = await browser.post("/login", data={"code": code, "next": "/platform"})
    assert (entered.status_code, entered.headers["location"]) == (303, "/platform")
    assert (await browser.get("/")).status_code == 200
    for again in (
        await browser.get("/login", params={"code": code}),
        await browser.post("/login", data={"code": code}),
    ):
        assert again.status_code == 401
        assert "has been used" in again.text


async def test_a_link_of_somebody_else_says_so_and_another_site_cannot_use_it(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await sign_in(browser, await create_api_key(app, "ada", "read", owner="ada"))
    code = await app.services.sessions.issue_code(Bearer(ROOT, digest(API_KEY)))
    offered = (await browser.get("/login", params={"code": code})).text
    assert "You are signed in as ada" in offered
    foreign = await browser.post(
        "/login", data={"code": code}, headers={"Origin": "http://evil.example"}
    )
    assert foreign.status_code == 403
    assert ">ada<" in (await browser.get("/")).text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:81", None])
async def test_another_site_cannot_press_a_button(
    browser: httpx.AsyncClient, origin: str | None
) -> None:
    await sign_in(browser, API_KEY)
    key = form_key_in((await browser.get("/")).text)
    request = browser.build_request("POST", "/runs/x/stop", data={"form_key": key})
    del request.headers["origin"]
    if origin is not None:
        request.headers["origin"] = origin
    refused = await browser.send(request)
    assert refused.status_code == 403
    assert "does not come from a page of this server" in refused.text
    pressed = await browser.post("/runs/x/stop", data={"form_key": key})
    assert pressed.status_code == 404  # it came through: there is no such run


async def test_a_form_without_its_key_changes_nothing(browser: httpx.AsyncClient) -> None:
    await sign_in(browser, API_KEY)
    for fields in ({}, {"form_key": "0" * 40}, {"form_key": "\N{SNOWMAN}"}):
        refused = await browser.post("/runs/x/stop", data=fields)
        assert refused.status_code == 403
        assert "open its page again" in refused.text


async def test_an_ended_session_keeps_a_form_valid(browser: httpx.AsyncClient) -> None:
    await sign_in(browser, API_KEY)
    key = form_key_in((await browser.get("/")).text)
    browser.cookies.clear()
    refused = await browser.post("/runs/x/stop", data={"form_key": key})
    assert refused.status_code == 401
    assert "Sign in again in another tab" in refused.text
    await sign_in(browser, API_KEY)
    assert (await browser.post("/runs/x/stop", data={"form_key": key})).status_code == 404


async def test_an_api_key_without_the_scope_sees_why(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await sign_in(browser, await create_api_key(app, "reader", "read"))
    key = form_key_in((await browser.get("/")).text)
    refused = await browser.post("/runs/x/stop", data={"form_key": key})
    assert refused.status_code == 403
    assert refused.headers["content-type"].startswith("text/html")
    assert "needs an API key with the scope control" in refused.text


async def test_signing_out_everywhere_refuses_each_open_cookie_at_its_next_request(
    app: Application,
) -> None:
    """Those of all API keys of a user, links that were not used yet, and nobody else's."""
    names = {"desk": "ada", "phone": "ada", "other": "bob"}
    texts = {name: await create_api_key(app, name, "read", owner=o) for name, o in names.items()}
    link = await ask(app, "POST", "/api/v1/login-links", texts["desk"], json={})
    async with signed_in(app) as admin, AsyncExitStack() as stack:
        browsers = {
            name: await stack.enter_async_context(signed_in(app, text))
            for name, text in texts.items()
        }
        page = (await browsers["desk"].get("/sessions")).text
        assert "(this one)" in page
        assert "phone" in page
        assert "other" not in page
        key = form_key_in(page)
        assert (await browsers["desk"].post("/sessions/end", data={})).status_code == 403
        ended = await browsers["desk"].post("/sessions/end", data={"form_key": key})
        assert ended.headers["location"] == "/login"
        statuses = {name: (await one.get("/")).status_code for name, one in browsers.items()}
        assert statuses == {"desk": 303, "phone": 303, "other": 200}
        assert (await admin.get("/")).status_code == 200
        code = link.json()["url"].partition("code=")[2]
        assert (await browsers["desk"].post("/login", data={"code": code})).status_code == 401


async def test_sessions_are_listed_and_ended_by_the_api(app: Application) -> None:
    ada = await create_api_key(app, "ada", "read", owner="ada")
    gone = await create_api_key(app, "gone", "read", owner="ada")
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    bound = await create_api_key(app, "bound", "admin", workspace="w", owner="ada")

    async def send(method: str, api_key: str, query: str = "") -> tuple[int, Any]:
        answer = await ask(app, method, f"/api/v1/sessions{query}", api_key)
        return answer.status_code, answer.json()

    async with AsyncExitStack() as stack:
        for text in (API_KEY, ada, ada, gone, bound):
            await stack.enter_async_context(signed_in(app, text))
        assert (await app.api.delete("/api/v1/api-keys/gone")).status_code == 200
        _, listed = await send("GET", ada)
        assert [one["api_key_name"] for one in listed["sessions"]] == ["bound", "ada", "ada"]
        _, everyone = await send("GET", API_KEY, "?all=true")
        assert [one["owner"] for one in everyone["sessions"]] == ["ada"] * 3 + ["admin"]
        _, own = await send("GET", bound)
        assert [one["api_key_name"] for one in own["sessions"]] == ["bound"]
        for api_key, query in ((ada, "?all=true"), (ada, "?owner=admin"), (bound, "?owner=bob")):
            assert [(await send(verb, api_key, query))[0] for verb in ("GET", "DELETE")] == [
                403,
                403,
            ]
        assert await send("DELETE", bound) == (200, {"ended": 1})
        assert await send("DELETE", API_KEY, "?owner=ada") == (200, {"ended": 2})
        assert await send("DELETE", API_KEY) == (200, {"ended": 1})
    assert {one["route"] for one in (await app.get("/audit"))["audit"]} >= {"/sessions"}
