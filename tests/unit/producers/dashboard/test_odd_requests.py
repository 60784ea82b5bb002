"""Requests that no page makes: odd numbers and cursors, cookies of others, forms of any bytes."""

from collections.abc import AsyncIterator

import httpx
import pytest

from infra.spine.ports.event_log import Cursor
from producers.http.browsers import COOKIE
from tests.kit.application import Application
from tests.kit.signed_in import form_key_in, signed_in
from tests.kit.story import beginning

pytestmark = pytest.mark.postgres

LARGEST = Cursor(2**63 - 1, 2**63 - 1)
NUMBERS = ("nan", "-1", str(2**63), "1e9", "9" * 5000, "0" * 5000 + "1", "0" * 11 + "1" + "9" * 20)
CURSORS = ("x", "1-", "-1--1", "0x1-0x1", "1_0-1", " 1-1", "f" * 16 + "-1", "1-" + "f" * 30)
LISTS = {
    "limit": ("/runs.json", "/evals.json", "/datasets", "/workspaces", "/platform"),
    "offset": ("/evals", "/datasets.json", "/workspaces.json", "/platform"),
    "step": ("/runs/r/samples", "/runs/r/timeline.json"),
    "first": ("/runs/r/curves.json",),
}


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    await app.append(list(beginning("r", "first", steps=2)))
    async with signed_in(app) as client:
        yield client


async def test_a_number_that_no_list_has_is_refused(browser: httpx.AsyncClient) -> None:
    for name, paths in LISTS.items():
        for path in paths:
            for text in NUMBERS:
                answer = await browser.get(path, params={name: text})
                assert answer.status_code == 400, (path, name, text)
                assert "must be a whole number" in answer.text


async def test_a_cursor_that_no_answer_gave_is_refused(browser: httpx.AsyncClient) -> None:
    for path in ("/runs/r/events", "/runs/r/events.json"):
        for name in ("after", "before"):
            for text in CURSORS:
                answer = await browser.get(path, params={name: text})
                assert answer.status_code == 400, (path, name, text)
            largest = await browser.get(path, params={name: str(LARGEST)})
            assert largest.status_code == 200
    assert (await browser.get(f"/runs/r/at/{LARGEST}")).status_code == 404


@pytest.mark.parametrize(
    "other", ['a={"b":1}', "a b", 'a="b', "a[0]=1", "=", "a=\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
async def test_cookies_of_other_programs_on_this_host_end_no_session(
    browser: httpx.AsyncClient, other: str
) -> None:
    mine = next(one.value for one in browser.cookies.jar if one.name == COOKIE)
    for text in (f"{other}; {COOKIE}={mine}", f"{COOKIE}={mine}; {other}"):
        browser.cookies.clear()
        answer = await browser.get("/", headers=[(b"Cookie", text.encode())])
        assert answer.status_code == 200
    unknown = await browser.get("/", headers={"Cookie": f"{COOKIE}=of-another-installation"})
    assert (unknown.status_code, unknown.headers["location"]) == (303, "/login")


@pytest.mark.parametrize("page", ["/new", "/new-evaluation"])
async def test_a_form_of_any_bytes_is_answered(browser: httpx.AsyncClient, page: str) -> None:
    key = form_key_in((await browser.get(page)).text)
    bodies = [
        b"\xff\xfe" * 50,
        b"&".join(b"field%d=1" % n for n in range(10_000)),
        b"x" * (2 << 20),
        f"form_key={key}&form_key=x".encode(),
    ]
    for toml in ("%ff%00", "x=" + "9" * 6000, "lr=0x" + "f" * 6000, "x=" + "[" * 9000, "a." * 9000):
        for action in ("check", "read", "write", "submit"):
            bodies.append(f"form_key={key}&action={action}&toml={toml}".encode())
    for body in bodies:
        answer = await browser.post(
            page, content=body, headers={"Content-Type": "application/x-www-form-urlencoded"}
        )
        assert answer.status_code in (400, 403), body[:80]
        assert answer.headers["content-type"].startswith("text/html")


async def test_another_method_is_refused_with_those_that_are_allowed(
    browser: httpx.AsyncClient,
) -> None:
    for method in ("OPTIONS", "PUT", "DELETE"):
        answer = await browser.request(method, "/runs/r")
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert (await browser.head("/runs/r")).status_code == 200
