"""An open page whose stream broke, because the computer slept or the network was away: it goes on where
it was, and asks only for what it missed."""

from uuid import uuid4

import pytest
from playwright.sync_api import Browser, Request, expect

from producers.dashboard.live import LiveRuns
from producers.dashboard.pages.runs import REWARD
from schemas.events import RunFinished
from tests.browser.conftest import Shown
from tests.kit.chromium import WITHIN_MS, open_link, visiting
from tests.kit.platform import eventually
from tests.kit.showcase import SECOND, STEPS, step_events

pytestmark = [pytest.mark.browser, pytest.mark.postgres]

NUM_KNOWN = STEPS * 2 // 3
MISSED = 1000
"""Steps of an hour, at one in about four seconds."""


async def append_steps(shown: Shown, first: int, last: int) -> None:
    log = shown.dashboard.app.services.log
    for step in range(first, last + 1):
        for event in step_events(SECOND, step):
            [recorded] = await log.append([event], cause=uuid4())
    assert await shown.dashboard.app.services.readmodel.caught_up(recorded.cursor)


async def break_streams(live: LiveRuns) -> None:
    live._feeds[SECOND].send(None)


def test_a_page_that_slept_for_an_hour_asks_for_what_it_missed(
    browser: Browser, shown: Shown
) -> None:
    dashboard, asked = shown.dashboard, list[Request]()
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, dashboard.sign_in_link())
        page.goto(f"{dashboard.url}/runs/{SECOND}")
        live = eventually(lambda: _viewed(shown), within_s=60, what="the page follows the run")
        figure = page.locator(f"[data-line='{REWARD}'] b")
        dashboard.run(append_steps(shown, NUM_KNOWN + 1, NUM_KNOWN + 1))
        expect(figure).to_have_text(_reward(NUM_KNOWN + 1), timeout=WITHIN_MS)
        page.on("request", lambda request: asked.append(request))
        dashboard.run(break_streams(live))
        dashboard.run(append_steps(shown, NUM_KNOWN + 2, NUM_KNOWN + MISSED))
        expect(figure).to_have_text(_reward(NUM_KNOWN + MISSED), timeout=WITHIN_MS)
        streams = [one for one in asked if one.url.endswith("/live")]
        assert streams
        known = int(streams[-1].all_headers()["last-event-id"])
        assert known in (NUM_KNOWN, NUM_KNOWN + 1)  # it may have read the last step with the curves
        assert not [one for one in asked if "curves.json" in one.url]
        finished = RunFinished(run=SECOND, step=NUM_KNOWN + MISSED, reward=0.9)
        dashboard.run(dashboard.app.append([finished]))
        expect(page.locator("h1 .status")).to_have_text("finished", timeout=WITHIN_MS)
        watch.assert_nothing()


def _viewed(shown: Shown) -> LiveRuns | None:
    live: LiveRuns | None = getattr(shown.dashboard.app.app.state, "live_runs", None)
    return live if live is not None and live.num_viewers else None


def _reward(step: int) -> str:
    """The reward of a step as the chart's caption shows it."""
    metrics = next(
        event for event in step_events(SECOND, step) if "metrics" in event.model_fields_set
    )
    value = metrics.model_dump()["metrics"][REWARD]
    return f"{value:.4g}"
