"""Hostile texts in Chromium: none runs or asks another server, and the browser refuses nothing."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby

import pytest
from playwright.sync_api import Browser, Page, expect

from producers.dashboard import rendering
from producers.dashboard.formats import plain
from tests.browser.conftest import Shown
from tests.kit.chromium import WITHIN_MS, open_link, visiting
from tests.kit.hostile_strings import MARKUP, hostile_strings
from tests.kit.kill_sample import turn_of
from tests.kit.platform import eventually
from tests.kit.poisoned_pages import Poison, RenderedPage, poisoned_pages, recorded_pages
from tests.kit.source import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.postgres]

NUM_STRINGS = 1000
SHARES = 8
"""A page gets every eighth string, the next page the next ones, and the next commit too. So each field
gets some of every kind, and all strings within eight commits."""

TOGETHER, SHORT = 10, 500
MARKS = "<>\"'"

expect.set_options(timeout=WITHIN_MS)


@pytest.fixture
def visitor(browser: Browser, shown: Shown) -> Iterator[Page]:
    with visiting(browser, shown.dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        yield page
        # A text in the place of the points of a curve is a mistake of the test.
        shapes = ("attribute points", "<path> attribute d")
        watch.errors = [one for one in watch.errors if not any(shape in one for shape in shapes)]
        watch.assert_nothing()


def num_reports(shown: Shown) -> int:
    return shown.dashboard.app.services.page_reports.count


def test_nothing_runs_on_any_page(visitor: Page, shown: Shown) -> None:
    """Each page is opened until each string of its share was somewhere on it, several in one text."""
    before, opened = num_reports(shown), Counter[str]()
    for number, (name, path) in enumerate(shown.showcase.pages.items()):
        texts = _joined(_share(number))
        with poisoned_pages(texts) as poison:
            while poison.num_replaced < len(texts):
                visitor.goto(shown.dashboard.url + path)
                assert visitor.evaluate("window.hacked") is None, name
                assert visitor.evaluate("document.body.lastElementChild.id") == "main", name
                opened[name] += 1
    assert set(opened) == set(shown.showcase.pages)
    assert num_reports(shown) == before


def _share(number: int) -> list[str]:
    """The strings of the page with this number, for this commit."""
    turn = turn_of(ROOT).number
    return hostile_strings(NUM_STRINGS)[(number + turn) % SHARES :: SHARES]


def _joined(strings: list[str]) -> list[str]:
    """The same strings, ten in one text. Long ones stay alone, because pages cut long texts."""
    short = [text for text in strings if len(text) < SHORT]
    groups = [short[n : n + TOGETHER] for n in range(0, len(short), TOGETHER)]
    return [*(" ".join(group) for group in groups), *(t for t in strings if len(t) >= SHORT)]


def test_every_field_escapes_the_strings(visitor: Page, shown: Shown) -> None:
    """The marks that can end a text are counted: there are as many as with a harmless text of the same
    length. A long text is cut, and has a link to all of it."""
    for number, (name, page) in enumerate(_pages(visitor, shown).items()):
        for length, texts in groupby(sorted(_share(number), key=len), key=len):
            wanted = _marks(page, "x" * max(1, length))
            for text in texts:
                assert _marks(page, text) == wanted, (name, text[:200])


def _pages(visitor: Page, shown: Shown) -> dict[str, RenderedPage]:
    found = {}
    for name, path in shown.showcase.pages.items():
        with recorded_pages() as rendered:
            visitor.goto(shown.dashboard.url + path)
        found[name] = rendered[0]
    return found


def _marks(page: RenderedPage, text: str) -> list[int]:
    """How often each mark is in a page whose texts are all this one."""
    found = page.render(Poison([text]))
    return [found.count(mark) for mark in MARKS]


def test_the_streamed_answers_of_models_stay_text(visitor: Page, shown: Shown) -> None:
    """The script of the playground shows them, so no template escapes them."""
    strings = hostile_strings(NUM_STRINGS, storable=True)
    pieces = ({"choices": [{"delta": {"content": text}}]} for text in strings)
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    visitor.route(
        "**/playground/stream",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    visitor.goto(f"{shown.dashboard.url}/playground")
    visitor.get_by_role("textbox", name="Question").fill(MARKUP[0])
    visitor.get_by_role("button", name="Ask both").click()
    expect(visitor.locator("#state")).to_have_text("Both models have answered.")
    answers = visitor.locator("#turns article pre").all_text_contents()
    assert answers == [plain("".join(strings), 1 << 30)] * 2
    assert visitor.locator("#turns .question").text_content() == MARKUP[0]
    assert visitor.evaluate("window.hacked") is None
    assert visitor.locator("#turns *:not(section, pre, div, article, h2)").count() == 0


def test_the_playground_says_why_a_question_is_refused(visitor: Page, shown: Shown) -> None:
    visitor.goto(f"{shown.dashboard.url}/playground")
    visitor.get_by_role("textbox", name="Question").fill("Say 3")
    visitor.get_by_text("Settings").click()
    visitor.get_by_label("Temperature").fill("hot")
    visitor.get_by_role("button", name="Ask both").click()
    expect(visitor.locator("#turns article pre").first).to_have_text(
        "No answer: temperature must be a number from 0 to 2, got 'hot'"
    )


def test_without_escaping_the_headers_stop_the_code_and_the_browser_reports_it(
    browser: Browser, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rendering, "_environment", partial(rendering._environment().overlay, autoescape=False)
    )
    before = num_reports(shown)
    with visiting(browser, shown.dashboard.url) as (context, watch), ExitStack() as stack:
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        stack.enter_context(poisoned_pages(MARKUP[:8]))
        page.goto(shown.dashboard.url)
        eventually(
            lambda: True if num_reports(shown) > before else None, within_s=60, what="a report"
        )
        assert watch.errors
        assert page.evaluate("window.hacked") is None


def test_without_escaping_and_without_the_headers_the_strings_run(
    browser: Browser, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rendering, "_environment", partial(rendering._environment().overlay, autoescape=False)
    )
    monkeypatch.delitem(rendering.HEADERS, "Content-Security-Policy")
    with visiting(browser, shown.dashboard.url) as (context, watch), ExitStack() as stack:
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        stack.enter_context(poisoned_pages(MARKUP[:8]))
        page.goto(shown.dashboard.url)
        eventually(lambda: True if watch.dialogs else None, within_s=60, what="a dialog")
        assert page.evaluate("window.hacked") >= 1
        assert watch.outside
