"""Signing in: who gets a session, how long it lasts, and what other sites cannot do with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from infra.access.sessions import Bearer
from infra.access.token_format import digest
from infra.ports.actor import ROOT
from tests.kit.application import TOKEN, Application
from tests.kit.tokens import create_token

pytestmark = pytest.mark.postgres

HERE = "http://127.0.0.1"


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a token, which keeps cookies and says where its requests come from."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        yield client


async def sign_in(browser: httpx.AsyncClient, token: str, following: str = "/") -> httpx.Response:
    return await browser.post("/login", data={"token": token, "next": following})


@asynccontextmanager
async def signed_in(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """A browser with a session of the administrator, until the block ends. An error of the application
    is raised."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        await sign_in(client, TOKEN)
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
    entered = await sign_in(browser, TOKEN, "/runs/some-run?range=6h")
    assert entered.headers["location"] == "/runs/some-run?range=6h"
    assert (await browser.get("/")).status_code == 200


async def test_a_wrong_token_opens_nothing(browser: httpx.AsyncClient) -> None:
    for text in ("", "wrong", TOKEN + "x", "hr_0000000000_" + "A" * 49):
        refused = await sign_in(browser, text)
        assert refused.status_code == 401
        assert "not a valid token" in refused.text
        assert "set-cookie" not in refused.headers
    assert (await browser.get("/")).status_code == 303


@pytest.mark.parametrize(
    "outside", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1", "x"]
)
async def test_the_form_leads_nowhere_else(browser: httpx.AsyncClient, outside: str) -> None:
    assert (await sign_in(browser, TOKEN, outside)).headers["location"] == "/"


async def test_the_cookie_is_hidden_from_scripts_and_is_not_in_the_database(
    app: Application, browser: httpx.AsyncClient
) -> None:
    entered = await sign_in(browser, TOKEN)
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    value = cookie.partition("=")[2].partition(";")[0]
    rows = await app.database.durable.fetch("select s::text from browser_sessions s")
    assert len(rows) == 1
    assert value not in str(rows)
    assert TOKEN not in str(rows)


async def test_a_session_is_not_for_the_api(browser: httpx.AsyncClient) -> None:
    await sign_in(browser, TOKEN)
    assert (await browser.get("/api/v1/runs")).status_code == 401


async def test_a_session_ends_with_its_token(app: Application, browser: httpx.AsyncClient) -> None:
    token = await create_token(app, "ada", "read")
    await sign_in(browser, token)
    assert (await browser.get("/")).status_code == 200
    revoked = await app.api.delete("/api/v1/tokens/ada")
    assert revoked.status_code == 200
    assert (await browser.get("/")).status_code == 303


async def test_signing_out_ends_the_session_also_for_a_copy_of_the_cookie(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await sign_in(browser, TOKEN)
    copied = dict(browser.cookies)
    key = form_key_in((await browser.get("/")).text)
    left = await browser.post("/logout", data={"form_key": key})
    assert left.headers["location"] == "/login"
    browser.cookies.update(copied)
    assert (await browser.get("/")).status_code == 303


async def test_a_code_opens_one_session(app: Application, browser: httpx.AsyncClient) -> None:
    code = await app.services.sessions.issue_code(Bearer(ROOT, digest(TOKEN)))
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
    await sign_in(browser, await create_token(app, "ada", "read", owner="ada"))
    code = await app.services.sessions.issue_code(Bearer(ROOT, digest(TOKEN)))
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
    await sign_in(browser, TOKEN)
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
    await sign_in(browser, TOKEN)
    for fields in ({}, {"form_key": "0" * 40}, {"form_key": "\N{SNOWMAN}"}):
        refused = await browser.post("/runs/x/stop", data=fields)
        assert refused.status_code == 403
        assert "open its page again" in refused.text


async def test_an_ended_session_keeps_a_form_valid(browser: httpx.AsyncClient) -> None:
    await sign_in(browser, TOKEN)
    key = form_key_in((await browser.get("/")).text)
    browser.cookies.clear()
    refused = await browser.post("/runs/x/stop", data={"form_key": key})
    assert refused.status_code == 401
    assert "Sign in again in another tab" in refused.text
    await sign_in(browser, TOKEN)
    assert (await browser.post("/runs/x/stop", data={"form_key": key})).status_code == 404


async def test_a_token_without_the_scope_sees_why(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await sign_in(browser, await create_token(app, "reader", "read"))
    key = form_key_in((await browser.get("/")).text)
    refused = await browser.post("/runs/x/stop", data={"form_key": key})
    assert refused.status_code == 403
    assert refused.headers["content-type"].startswith("text/html")
    assert "needs a token with the scope control" in refused.text


def form_key_in(text: str) -> str:
    """The key that the forms of a page hold."""
    return text.partition('name="form_key" value="')[2].partition('"')[0]
