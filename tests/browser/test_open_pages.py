"""Pages that stay open while things happen: what a person has marked stays, figures move, and a page
whose server refused it for a while goes on."""

import re
from uuid import uuid4

import pytest
from playwright.sync_api import Browser, expect

from producers.dashboard import live
from schemas.events import RunPaused
from tests.browser.conftest import Shown
from tests.kit.chromium import WITHIN_MS, open_link, visiting
from tests.kit.showcase import FIRST, SECOND, STEPS, step_events

pytestmark = [pytest.mark.browser, pytest.mark.postgres]

NEXT_STEP = STEPS * 2 // 3 + 1


async def append_step(shown: Shown, step: int) -> None:
    app = shown.dashboard.app
    for event in step_events(SECOND, step):
        [recorded] = await app.services.log.append([event], cause=uuid4())
    assert await app.services.readmodel.caught_up(recorded.cursor)


def test_marked_runs_stay_marked_while_the_list_moves(browser: Browser, shown: Shown) -> None:
    dashboard = shown.dashboard
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, dashboard.sign_in_link())
        boxes = page.get_by_role("checkbox", name=re.compile("^Compare "))
        boxes.nth(0).check()
        boxes.nth(2).check()
        page.get_by_role("heading", name="Runs").click()  # the list has the focus no more
        row = page.get_by_role("row").filter(has=page.locator(f"[value='{SECOND}']"))
        dashboard.run(append_step(shown, NEXT_STEP))
        expect(row).to_contain_text(f"{NEXT_STEP} / {STEPS}", timeout=WITHIN_MS)
        assert [boxes.nth(place).is_checked() for place in range(4)] == [True, False, True, False]
        page.get_by_role("button", name="Compare").click()
        expect(page.get_by_role("heading", name="Compare runs")).to_be_visible()
        watch.assert_nothing()


def test_figures_move_with_the_curves(browser: Browser, shown: Shown) -> None:
    dashboard = shown.dashboard
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, dashboard.sign_in_link())
        pages = []
        page.on("request", lambda one: pages.append(one.url))
        page.goto(f"{dashboard.url}/runs/{SECOND}")
        state = page.locator("#progress")
        samples = page.locator("#figures div").filter(has_text="Samples").locator("dd")
        expect(page.get_by_text("Draw over a part of a curve")).to_be_visible()
        before = samples.text_content() or ""
        dashboard.run(append_step(shown, NEXT_STEP + 1))
        expect(state).to_contain_text(f"step {NEXT_STEP + 1} of {STEPS}", timeout=WITHIN_MS)
        expect(samples).not_to_have_text(before)
        assert pages.count(f"{dashboard.url}/runs/{SECOND}") == 1, "the page is not read again"
        watch.assert_nothing()


def test_a_page_whose_stream_is_refused_for_a_while_goes_on(
    browser: Browser, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a server that has started and whose database has not."""
    dashboard = shown.dashboard
    monkeypatch.setattr(live, "MOST_VIEWERS", 0)
    with visiting(browser, dashboard.url) as (context, _):
        page = context.new_page()
        open_link(page, dashboard.sign_in_link())
        with page.expect_response(lambda answer: answer.url.endswith("/live")) as refused:
            page.goto(f"{dashboard.url}/runs/{SECOND}")
        assert refused.value.status == 503
        monkeypatch.undo()
        paused = RunPaused(run=SECOND, step=NEXT_STEP + 1, reason="by ada")
        with page.expect_response(lambda answer: answer.url.endswith("/live")) as taken:
            dashboard.run(dashboard.app.append([paused]))
        assert taken.value.status == 200
        expect(page.locator("h1 .status")).to_have_text("paused", timeout=WITHIN_MS)


def test_a_page_says_that_its_session_has_ended(browser: Browser, shown: Shown) -> None:
    dashboard = shown.dashboard
    with visiting(browser, dashboard.url) as (context, _):
        page = context.new_page()
        open_link(page, dashboard.sign_in_link())
        expect(page.get_by_text("Your session has ended")).to_be_hidden()
        context.clear_cookies()
        expect(page.get_by_text("Your session has ended")).to_be_visible(timeout=WITHIN_MS)


def test_a_range_is_chosen_and_sent_to_somebody_else(browser: Browser, shown: Shown) -> None:
    url = f"{shown.dashboard.url}/runs/{FIRST}"
    with visiting(browser, shown.dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        page.goto(f"{url}?level=info")
        page.get_by_label("Range").select_option("6h")
        expect(page).to_have_url(f"{url}?level=info&range=6h")
        page.get_by_label("Steps from").fill("10")
        page.get_by_label("to", exact=True).fill("12")
        page.get_by_label("to", exact=True).press("Tab")
        expect(page.get_by_label("Range")).to_have_value("custom")
        page.get_by_label("Smoothing").fill("0.5")
        expect(page).to_have_url(f"{url}?level=info&first=10&last=12&smoothing=0.5")
        page.reload()
        expect(page.get_by_label("Range")).to_have_value("custom")
        expect(page.get_by_label("Smoothing")).to_have_value("0.5")
        page.get_by_label("to", exact=True).fill("9")  # before the first step
        page.get_by_label("to", exact=True).press("Enter")
        expect(page).to_have_url(f"{url}?level=info&first=10&last=12&smoothing=0.5")
        last = page.locator("[data-line='rollout/raw_reward'] b")
        page.get_by_label("to", exact=True).fill("")
        page.get_by_label("Steps from").fill("1000")
        page.get_by_label("Steps from").press("Enter")
        expect(last).to_have_text("—")
        page.get_by_label("Range").select_option("all")
        expect(last).not_to_have_text("—")
        expect(page.get_by_label("Steps from")).to_have_value("")
        watch.assert_nothing()


def test_without_javascript_a_range_is_a_form(browser: Browser, shown: Shown) -> None:
    url = f"{shown.dashboard.url}/runs/{FIRST}"
    with visiting(browser, shown.dashboard.url, java_script_enabled=False) as (context, _):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        page.goto(f"{url}?level=info")
        page.get_by_label("Range").select_option("custom")
        page.get_by_label("Steps from").fill("30")
        page.get_by_role("button", name="Show").first.click()
        expect(page.get_by_label("Steps from")).to_have_value("30")
        expect(page.get_by_label("Severity")).to_have_value("info")
        assert re.search(r"range=custom&first=30&last=&.*level=info#curves$", page.url)


def test_an_answer_is_as_wide_before_the_others_have_arrived(
    browser: Browser, shown: Shown
) -> None:
    with visiting(browser, shown.dashboard.url) as (context, _):
        page = context.new_page()
        open_link(page, shown.dashboard.sign_in_link())
        page.goto(f"{shown.dashboard.url}/runs/{FIRST}/samples?step=2")
        width = "document.querySelector('article.sample').getBoundingClientRect().width"
        whole = page.evaluate(width)
        page.evaluate(
            "document.querySelectorAll('article.sample + article').forEach(e => e.remove())"
        )
        assert page.evaluate(width) == whole
