"""The protections of a session and its pages: cookie, headers, expiry, and the address after signing
in."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from infra.identity.sessions import Bearer
from infra.settings.settings import Settings
from producers.http.browsers import COOKIE, HOST_COOKIE, comes_from_here, local_path
from tests.kit.application import API_KEY, Application, application
from tests.kit.hostile_strings import hostile_strings
from tests.kit.signed_in import form_key_in, sign_in

pytestmark = pytest.mark.postgres

HERE = "http://127.0.0.1"


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        yield client


async def test_every_answer_of_a_page_is_private_and_in_no_frame(
    browser: httpx.AsyncClient,
) -> None:
    await sign_in(browser, API_KEY)
    key = form_key_in((await browser.get("/")).text)
    answers = [
        await browser.get("/"),
        await browser.get("/runs/nothing"),
        await browser.get("/compare.json?runs=a,b"),
        await browser.get("/login"),
        await browser.post("/runs/x/stop", data={"form_key": key}),
        await browser.post("/runs/x/stop", data={}),
        await browser.post("/logout", data={"form_key": key}),
    ]
    for answer in answers:
        headers = answer.headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "same-origin"
        rules = dict(
            rule.strip().partition(" ")[::2]
            for rule in headers["content-security-policy"].split(";")
        )
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == "'self'"
        assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["form-action"] == "'self'"


@pytest.mark.parametrize(
    ("public_url", "is_secure"), [("https://headrace.example.org", True), (HERE, False)]
)
async def test_the_cookie_is_sent_over_https_only_where_the_server_is_reached_so(
    app: Application, browser: httpx.AsyncClient, public_url: str, *, is_secure: bool
) -> None:
    settings = replace(app.services.settings, public_url=public_url)
    object.__setattr__(app.services, "settings", settings)
    cookie = (await sign_in(browser, API_KEY)).headers["set-cookie"]
    parts = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "path=/", "samesite=lax"} <= parts
    assert ("secure" in parts) is is_secure
    assert not [part for part in parts if part.startswith("domain")]


async def test_a_session_expires_and_its_row_counts_for_nothing(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await sign_in(browser, API_KEY)
    assert (await browser.get("/")).status_code == 200
    await app.database.durable.execute(
        "update browser_sessions set expires_at = now() - $1::interval", timedelta(seconds=1)
    )
    assert (await browser.get("/")).headers["location"] == "/login"


async def test_expired_sessions_and_codes_are_deleted_in_bounded_batches(app: Application) -> None:
    pool, sessions = app.database.durable, app.services.sessions
    bearer = Bearer("root", b"x" * 32)
    for table in ("browser_sessions", "sign_in_codes"):
        await pool.execute(
            f"insert into {table} (sha256, api_key, api_key_sha256, expires_at)"
            " select sha256(n::text::bytea), 'root', 'x', now() - interval '1 day'"
            " from generate_series(1, 1500) n"
        )
    for left in (501, 2):
        await sessions.open(bearer)
        await sessions.issue_code(bearer)
        for table in ("browser_sessions", "sign_in_codes"):
            found = await pool.fetchval(f"select count(*) from {table}")
            assert found == left


async def test_signing_in_again_makes_another_session(browser: httpx.AsyncClient) -> None:
    """A cookie that somebody else put into the browser never becomes a session."""
    browser.cookies.set(COOKIE, "chosen-by-somebody-else", domain="127.0.0.1")
    await sign_in(browser, API_KEY)
    found = [cookie.value for cookie in browser.cookies.jar if cookie.name == COOKIE]
    assert "chosen-by-somebody-else" not in found[-1:]
    first = found[-1]
    await sign_in(browser, API_KEY)
    assert [c.value for c in browser.cookies.jar if c.name == COOKIE][-1] != first


@pytest.mark.parametrize("origin", ["http://evil.example", "null", None])
async def test_another_site_cannot_sign_a_reader_in(
    browser: httpx.AsyncClient, origin: str | None
) -> None:
    request = browser.build_request("POST", "/login", data={"api_key": API_KEY})
    del request.headers["origin"]
    if origin is not None:
        request.headers["origin"] = origin
    refused = await browser.send(request)
    assert refused.status_code == 403
    assert "set-cookie" not in refused.headers


@pytest.mark.parametrize(
    ("public_url", "host", "origin", "is_ours"),
    [
        ("https://h.example", "h.example", "https://h.example", True),
        ("https://h.example:443/", "h.example", "https://h.example", True),
        ("https://H.example", "h.EXAMPLE", "https://H.example", True),
        ("https://h.example", "h.example", "http://h.example", False),
        ("https://h.example", "h.example", "ftp://h.example", False),
        ("https://h.example", "h.example", "://h.example", False),
        ("https://h.example", "h.example:8420", "http://h.example:8420", True),
        ("https://h.example", "127.0.0.1:8420", "http://127.0.0.1:8420", True),
        ("https://h.example", "127.0.0.1:8420", "http://127.0.0.1:8421", False),
        ("http://127.0.0.1:8420", "127.0.0.1:8420", "http://127.0.0.1:8420", True),
        ("http://127.0.0.1:8420", "127.0.0.1:8420", "https://127.0.0.1:8420", False),
        ("http://127.0.0.1:8420", "127.0.0.1:8420", "ftp://127.0.0.1:8420", False),
        ("http://127.0.0.1:8420", "[::1", "http://[::1", True),
        ("http://127.0.0.1:8420", "", "http://", False),
    ],
)
def test_a_page_of_the_same_host_with_another_scheme_is_another_site(
    public_url: str, host: str, origin: str, *, is_ours: bool
) -> None:
    headers = Headers({"host": host, "origin": origin})
    assert comes_from_here({"method": "POST"}, headers, public_url=public_url) is is_ours
    assert comes_from_here({"method": "GET"}, headers, public_url=public_url)


def test_no_text_leads_out_of_the_server_after_signing_in() -> None:
    for text in hostile_strings(1000, seed=11):
        for wanted in (text, f"/{text}", f"//{text}", f"/\\{text}", f"http:{text}"):
            found = local_path(wanted)
            assert found.startswith("/")
            assert not found.startswith(("//", "/\\"))
            assert found.isprintable()
            assert "\\" not in found


async def test_a_report_of_a_browser_is_counted_whatever_it_holds(
    app: Application, browser: httpx.AsyncClient
) -> None:
    for body in (b"", b"{}", b"\xff\x00" * 100_000, b'{"csp-report": {"blocked-uri": "inline"}}'):
        answer = await browser.post("/reports", content=body)
        assert answer.status_code == 204
    assert app.services.page_reports.count == 4
    metrics = (await app.api.get("/metrics")).text
    assert "headrace_page_reports 4" in metrics


async def test_over_https_the_cookie_is_of_this_host_alone(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host of the domain can set a cookie with the plain name; it opens nothing."""
    load = Settings.load
    monkeypatch.setattr(
        Settings,
        "load",
        lambda environ: load({**environ, "HEADRACE_PUBLIC_URL": "https://headrace.example"}),
    )
    async with application(database_url, tmp_path / "home") as app:
        transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
        here = "https://headrace.example"
        async with httpx.AsyncClient(
            transport=transport, base_url=here, headers={"Origin": here}
        ) as browser:
            answer = await browser.post("/login", data={"api_key": API_KEY})
            [cookie] = answer.headers.get_list("set-cookie")
            value = cookie.partition("=")[2].partition(";")[0]
            assert cookie.startswith(f"{HOST_COOKIE}=")
            assert "; Secure" in cookie
            assert "; Path=/" in cookie
            assert "domain" not in cookie.lower()
            assert (await browser.get("/")).status_code == 200
            browser.cookies.clear()
            plain = {"Cookie": f"{COOKIE}={value}"}
            assert (await browser.get("/", headers=plain)).status_code == 303
            full = {"Cookie": f"{HOST_COOKIE}={value}"}
            assert (await browser.get("/", headers=full)).status_code == 200
