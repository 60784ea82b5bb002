"""Every page in Chromium: readable for everybody, in light and dark and on a phone, without an error.

With HEADRACE_TEST_SCREENSHOTS a picture of each is written to that folder (`make screenshots`).
"""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import Shown
from tests.kit.chromium import DESK, PHONE, violations, visiting

pytestmark = [pytest.mark.browser, pytest.mark.postgres]

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
