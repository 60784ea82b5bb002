"""The curves of a run: a part that is chosen is read exactly, and is in the address of the page."""

import re

import pytest
from playwright.sync_api import Browser, expect

from schemas.events import EvaluationSettled
from tests.browser.conftest import Shown
from tests.kit.chromium import WITHIN_MS, open_link, visiting
from tests.kit.showcase import FIRST, SECOND, STEPS

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


TALLEST = """canvas => {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const counts = Array(width).fill(0);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const colour = data.slice(4 * pixel, 4 * pixel + 4);
    const isOrange = [194, 87, 26].every((part, place) => Math.abs(colour[place] - part) < 8);
    if (isOrange && colour[3]) counts[pixel % width]++;
  }
  return Math.max(...counts) / height;
}"""
"""The largest part of a column of a chart that has the colour of the held-out reward."""


def test_the_interval_of_the_held_out_reward_is_drawn_as_it_arrives(
    browser: Browser, shown: Shown
) -> None:
    dashboard = shown.dashboard

    def validate(step: int, **ends: float) -> None:
        metrics = {f"eval/reward/{end}": value for end, value in ends.items()}
        settled = EvaluationSettled(run=SECOND, step=step, reward=0.5, metrics=metrics)
        dashboard.run(dashboard.app.append([settled]))

    validate(0)
    validate(10)
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, dashboard.sign_in_link())
        page.goto(f"{dashboard.url}/runs/{SECOND}")
        chart = page.locator("figure.large canvas")
        legend = page.locator("figure.large").get_by_text("95 % interval")
        expect(page.locator("[data-line='eval/validation/reward']")).to_be_visible()
        expect(legend).to_be_hidden()
        assert chart.evaluate(TALLEST) < 0.1
        validate(20, low=0.0, high=1.0)
        expect(legend).to_be_visible(timeout=WITHIN_MS)
        assert chart.evaluate(TALLEST) > 0.5
        figure = page.locator("#figures div").filter(has_text="Validation Reward")
        expect(figure.locator("dd")).to_have_text("0.5 0 to 1")
        watch.assert_nothing()
