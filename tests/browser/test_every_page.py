"""Every page in Chromium: readable for everybody, in light and dark and on a phone, without an error.

With HEADRACE_TEST_SCREENSHOTS a picture of each is written to that folder (`make screenshots`).
"""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import Shown
from tests.kit.chromium import DESK, PHONE, open_link, violations, visiting

pytestmark = [pytest.mark.browser, pytest.mark.postgres]

LEAST_BYTES, MOST_BYTES = 10_000, 150_000
SLOW_NETWORK = {
    "offline": False,
    "latency": 0,
    "downloadThroughput": 40_000,
    "uploadThroughput": -1,
}
"""40 kB/s: a page arrives in parts, which a browser would show one after the other."""

FOCUSABLE = "a[href], button, input:not([type=hidden]), select, [tabindex='0']"
LOADED_BYTES = """() => ["navigation", "resource"]
  .flatMap((kind) => performance.getEntriesByType(kind))
  .reduce((sum, one) => sum + one.decodedBodySize, 0)"""
LAYOUT_SHIFT = """() => new Promise((resolve) => {
  let sum = 0;
  const add = (list) => { for (const one of list.getEntries()) sum += one.value; };
  const watch = new PerformanceObserver(add);
  watch.observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(sum), 500);
})"""

LOOKS = {
    "light": {"viewport": DESK, "color_scheme": "light"},
    "dark": {"viewport": DESK, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light"},
}


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_wrong_with_any_page(browser: Browser, shown: Shown, look: str) -> None:
    found: dict[str, list[str]] = {}
    too_wide = []
    url = shown.dashboard.url
    with visiting(browser, url, **LOOKS[look]) as (context, watch):
        page = context.new_page()
        page.goto(f"{url}/login")
        found["sign-in"] = violations(page)
        take_picture(page, f"sign-in-{look}")
        page.goto(shown.dashboard.sign_in_link())
        found["sign-in-link"] = violations(page)
        take_picture(page, f"sign-in-link-{look}")
        open_link(page, shown.dashboard.sign_in_link())
        for name, path in shown.showcase.pages.items():
            answer = page.goto(url + path)
            assert answer is not None
            assert answer.status == (404 if name == "not-found" else 200), name
            page.wait_for_load_state("load")
            found[name] = violations(page)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                too_wide.append(name)
            take_picture(page, f"{name}-{look}")
        watch.assert_nothing()
    assert [f"{name}: {slip}" for name, slips in found.items() for slip in slips] == []
    assert too_wide == []


def test_every_page_is_light_and_nothing_on_it_moves(browser: Browser, shown: Shown) -> None:
    """Bytes of a page and of all files that it loads, and how far its parts move while it loads over a
    slow network."""
    heavy, moving, url = {}, {}, shown.dashboard.url
    with visiting(browser, url) as (context, watch):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        context.new_cdp_session(page).send("Network.emulateNetworkConditions", SLOW_NETWORK)
        for name, path in shown.showcase.pages.items():
            page.goto(url + path)
            page.wait_for_load_state("load")
            if moved := page.evaluate(LAYOUT_SHIFT):
                moving[name] = moved
            loaded = page.evaluate(LOADED_BYTES)
            assert loaded > LEAST_BYTES, name  # the browser tells sizes
            if loaded > MOST_BYTES:
                heavy[name] = loaded
        watch.assert_nothing()
    assert heavy == {}
    assert moving == {}


def test_the_keyboard_reaches_everything_in_its_order(browser: Browser, shown: Shown) -> None:
    with visiting(browser, shown.dashboard.url) as (context, _):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        page.goto(f"{shown.dashboard.url}/")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        reached = []
        for _ in range(page.locator(FOCUSABLE).count()):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.matches('#main *')"))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none" or not reached[-1]
        assert sum(reached) >= page.locator(f"#main :is({FOCUSABLE}):visible").count()


def test_a_question_mark_shows_the_keys(browser: Browser, shown: Shown) -> None:
    with visiting(browser, shown.dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        page.goto(f"{shown.dashboard.url}/")
        page.keyboard.press("?")
        keys = page.get_by_role("dialog", name="Keys")
        keys.wait_for()
        assert not violations(page)
        page.keyboard.press("Escape")
        keys.wait_for(state="hidden")
        page.keyboard.press("/")
        page.keyboard.type("a?b")
        assert page.get_by_role("searchbox").input_value() == "a?b", "a key in a text is a letter"
        assert not keys.is_visible()
        watch.assert_nothing()


def test_axe_bites(browser: Browser, shown: Shown) -> None:
    with visiting(browser, shown.dashboard.url) as (context, _):
        page = context.new_page()
        page.goto(f"{shown.dashboard.url}/login")
        page.evaluate("document.querySelector('label').remove()")
        assert any(slip.startswith("label:") for slip in violations(page))


def take_picture(page: Page, name: str) -> None:
    """Write a picture of the whole page, if they are wanted."""
    if folder := os.environ.get("HEADRACE_TEST_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
