"""Texts of users stay texts: whatever they hold, a page has the same structure and is answered."""

from functools import partial
from urllib.parse import urlencode

import httpx
import pytest

from producers.dashboard import rendering
from tests.kit.application import Application
from tests.kit.hostile_strings import hostile_strings, one_line_of
from tests.kit.markup import structure
from tests.kit.poisoned_pages import Poison, RenderedPage, recorded_pages
from tests.kit.showcase import FIRST, fill

pytestmark = [pytest.mark.postgres, pytest.mark.attacks]

HERE = "http://127.0.0.1"
NUM_STRINGS = 1000
MB = 1 << 20
LARGEST_PAGE = 150_000


async def pages(app: Application, browser: httpx.AsyncClient) -> dict[str, RenderedPage]:
    """All pages of an installation that has something on each."""
    showcase, found = await fill(app, steps=3), {}
    for name, path in showcase.pages.items():
        with recorded_pages() as rendered:
            await browser.get(path)
        found[name] = rendered[-1]
    return found


async def test_a_thousand_strings_change_the_structure_of_no_page(
    app: Application, browser: httpx.AsyncClient
) -> None:
    """Each page is rendered until each string was somewhere on it, so each field gets many of them. In
    `tests/browser` every field gets all strings of a share."""
    strings = hostile_strings(NUM_STRINGS)
    # As long as the strings, because a long text is cut and has a link to all of it.
    harmless = [f"x{n}".ljust(len(string), "x") for n, string in enumerate(strings)]
    for name, page in (await pages(app, browser)).items():
        plain, poison = Poison(harmless), Poison(strings)
        while poison.num_replaced < NUM_STRINGS:
            found = page.render(poison).encode("utf-8", "replace").decode()
            try:
                assert structure(found) == structure(page.render(plain)), name
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


async def test_without_escaping_the_strings_change_pages(
    app: Application, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    unescaped = partial(rendering._environment().overlay, autoescape=False)
    monkeypatch.setattr(rendering, "_environment", unescaped)
    changed = []
    for name, page in (await pages(app, browser)).items():
        try:
            structure(page.render(Poison(hostile_strings(NUM_STRINGS))))
        except AssertionError:
            changed.append(name)
    assert set(changed) > {"runs", "run", "samples", "events", "evaluation", "dataset", "workspace"}


async def test_stored_text_stays_text_and_large_texts_are_cut(
    app: Application, browser: httpx.AsyncClient
) -> None:
    strings = iter(hostile_strings(2000, storable=True))
    large = one_line_of(8 * MB)

    def hostile(text: str) -> str:
        return large if text == "About 130." else next(strings)[:300]

    showcase = await fill(app, text=hostile, steps=3)
    for name, path in showcase.pages.items():
        page = await browser.get(path)
        assert page.status_code == (404 if name == "not-found" else 200), (name, page.text[:500])
        structure(page.text)
        assert len(page.content) < LARGEST_PAGE, name
    shown = (await browser.get(f"/runs/{FIRST}/samples?step=2")).text
    assert "more characters" in shown


@pytest.mark.parametrize(
    "path",
    [
        "/?search=%ff%fe&status=%ff",
        "/?search=" + "%3Cscript%3E" * 200,
        "/runs/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
        "/runs/%ff%fe",
        "/datasets/%ED%A0%80",
        "/compare?runs=%22%3E%3Cb%3E,%ff",
        "/evals/..%2f..%2fetc%2fpasswd",
        "/login?next=%22%3E%3Cscript%3E&code=%ff",
        "/?offset=-1&limit=%3Cb%3E",
    ],
)
async def test_an_address_is_text_too(browser: httpx.AsyncClient, path: str) -> None:
    answer = await browser.get(path)
    assert answer.status_code in (200, 400, 401, 404)
    assert answer.headers["content-type"].startswith("text/html")
    structure(answer.text)


async def test_the_name_of_a_metric_is_in_no_header(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=2)
    for key in (
        "a\r\nSet-Cookie: x=1",
        '"; filename="evil.html',
        "\u202egpj.csv",
        "<b>",
        "x" * 999,
    ):
        answer = await browser.get(f"/runs/{FIRST}/curve.csv", params={"key": key})
        assert (answer.status_code, answer.text) == (200, "step,value\n")
        assert answer.headers["content-type"].startswith("text/csv")
        assert "set-cookie" not in answer.headers
        name = answer.headers["content-disposition"].partition('filename="')[2][:-1]
        assert name.isascii()
        assert not set(name) & set('"\r\n;<>/\\')
        assert len(name) <= 150


async def test_a_form_is_text_too(browser: httpx.AsyncClient) -> None:
    key = (await browser.get("/new")).text.partition('name="form_key" value="')[2].partition('"')[0]
    for text in hostile_strings(30):
        fields = {"form_key": key, "action": "check", "toml": text, "name": text, "workspace": text}
        sent = urlencode(fields, errors="surrogatepass").encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = await browser.post("/new", content=sent, headers=headers)
        assert answer.status_code in (200, 400), answer.text[:300]
        structure(answer.text)
