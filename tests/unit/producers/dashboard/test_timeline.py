"""The waterfall: where bars lie, and which steps a page shows."""

from datetime import UTC, datetime, timedelta

import pytest

from infra.readmodel import timeline
from infra.readmodel.timeline import Span, StepTimes
from producers.dashboard.pages.timeline import NARROWEST, SHOWN_STEPS, WIDTH, bars
from tests.kit.application import Application
from tests.kit.signed_in import signed_in
from tests.kit.story import beginning, step

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_bars_fill_the_picture_from_the_first_to_the_last_moment() -> None:
    one = StepTimes(1, {"generate": Span(at(0), at(5)), "learn": Span(at(5), at(10))})
    first, second = bars(one, at(0), at(10))
    assert (first.left, first.width, first.seconds) == (0, WIDTH / 2, 5)
    assert (second.left, second.width, second.is_open) == (WIDTH / 2, WIDTH / 2, False)


def test_a_moment_can_be_seen_and_an_open_phase_reaches_the_end() -> None:
    one = StepTimes(1, {"grade": Span(at(10), at(10)), "learn": Span(at(2))})
    moment, still = bars(one, at(0), at(10))
    assert (moment.left, moment.width) == (WIDTH - NARROWEST, NARROWEST)
    assert (still.left + still.width, still.is_open, still.seconds) == (WIDTH, True, None)
    assert bars(one, None, None) == []


@pytest.mark.postgres
async def test_the_page_shows_the_newest_steps_or_those_from_a_step_on(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=90)])
    for number in range(1, 31):
        await app.append([*step("r", number)])
    async with signed_in(app) as browser:
        newest = (await browser.get("/runs/first/timeline.json")).json()
        assert [one["step"] for one in newest["steps"]] == [*range(32 - SHOWN_STEPS, 31)]
        assert newest["extent"]["later"] is None
        some = (await browser.get("/runs/first/timeline.json?step=3")).json()
        assert [one["step"] for one in some["steps"]] == [*range(3, 3 + SHOWN_STEPS)]
        beside = {"is_cut": False, "earlier": 1, "later": 23}
        assert some["extent"] == {"first": 3, "last": 22, **beside}
        assert some["steps"][0]["learn"]["seconds"] >= 0
        text = (await browser.get("/runs/first/timeline?step=3")).text
        assert text.count('<rect class="phase-learn"') == SHOWN_STEPS
        late = await browser.get("/runs/first/timeline?step=5000")
        assert "No event of these steps" in late.text
        assert (await browser.get("/runs/first/timeline?step=no")).status_code == 400


@pytest.mark.postgres
async def test_steps_with_too_many_events_are_spread_over_more_pages(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    await app.append([*beginning("r", "first", steps=90)])
    for number in range(1, 31):
        await app.append([*step("r", number)])
    timelines = app.services.readmodel.timelines
    whole, last = await timelines.steps("r", first=3, last=22, ahead=0)
    assert (len(whole), last) == (20, 22)
    monkeypatch.setattr(timeline, "MOST_EVENTS", 30)
    some, last = await timelines.steps("r", first=3, last=22, ahead=0)
    assert [one.step for one in some] == [*range(3, last + 1)]
    assert some == whole[: len(some)]
    assert 3 < last < 22
    async with signed_in(app) as browser:
        extent = (await browser.get("/runs/first/timeline.json?step=3")).json()["extent"]
        assert extent["is_cut"]
        page = (await browser.get("/runs/first/timeline?step=3")).text
        assert f"too many events for one page, so it ends with step {extent['last']}" in page
        newest = (await browser.get("/runs/first/timeline")).text
        assert "too many events for one page" in newest
    monkeypatch.setattr(timeline, "MOST_EVENTS", 2)
    assert (await timelines.steps("r", first=3, last=22, ahead=0))[1] == 3
