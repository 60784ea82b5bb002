"""The curves of a run: a part that is chosen is read exactly, and is in the address of the page."""

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Shown
from tests.kit.chromium import open_link, visiting
from tests.kit.showcase import FIRST, STEPS

pytestmark = [pytest.mark.browser, pytest.mark.postgres]


def test_a_part_is_chosen_by_numbers_and_by_drawing_over_it(browser: Browser, shown: Shown) -> None:
    url = f"{shown.dashboard.url}/runs/{FIRST}"
    with visiting(browser, shown.dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        page.goto(url)
        expect(page.get_by_text("Draw over a part of a curve")).to_be_visible()
        with page.expect_response(lambda answer: "first=10" in answer.url) as found:
            page.get_by_label("Steps from").fill("10")
            page.get_by_label("Steps from").press("Enter")
        answer = found.value.json()
        assert [step for step, _ in answer["curves"]["rollout/raw_reward"]] == [
            *range(10, STEPS + 1)
        ]
        assert {mark["kind"] for mark in answer["marks"]} == {"checkpoint"}
        expect(page).to_have_url(re.compile(r"first=10$"))
        plot = page.locator("figure .u-over").first
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] / 2, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.9, middle, steps=5)
        page.mouse.up()
        expect(page).to_have_url(re.compile(r"first=2\d&last=3\d"))
        plot = page.locator("figure .u-over").first
        plot.dblclick()
        expect(page).to_have_url(url)
        watch.assert_nothing()
