"""The page of a run: where its time goes, in which environment it works, and the same as JSON."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.kit.application import Application
from tests.kit.showcase import FIRST, PENDING, SECONDS, fill
from tests.unit.producers.dashboard.test_sign_in import signed_in

pytestmark = pytest.mark.postgres


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    await fill(app, steps=3)
    async with signed_in(app) as client:
        yield client


async def test_the_time_of_a_step_is_split(browser: httpx.AsyncClient) -> None:
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()
    assert shown["time_split_s"] == pytest.approx(SECONDS)
    page = (await browser.get(f"/runs/{FIRST}")).text
    assert "2.4 s" in page
    assert f'value="{2.4 / sum(SECONDS.values()):.3f}" aria-label="generate"' in page
    assert (await browser.get(f"/runs/{PENDING}/run.json")).json()["time_split_s"] == {}


async def test_the_environment_is_what_the_events_recorded(browser: httpx.AsyncClient) -> None:
    shown = (await browser.get(f"/runs/{FIRST}/run.json")).json()["environment"]
    assert shown["learner: torch"] == "2"
    assert " rows, " in shown["dataset"]
    assert "learner: torch" in (await browser.get(f"/runs/{FIRST}")).text
    pending = await browser.get(f"/runs/{PENDING}")
    assert 'id="environment"' not in pending.text


async def test_the_log_is_json_with_a_severity(browser: httpx.AsyncClient) -> None:
    lines = (await browser.get(f"/runs/{FIRST}/log.json?limit=2")).json()
    assert len(lines["lines"]) == 2
    assert lines["older"] is True
    warned = (await browser.get(f"/runs/{FIRST}/log.json?level=warning")).json()["lines"]
    assert {one["level"].lower() for one in warned} == {"warning"}
    for wrong in ("level=loud", "limit=0", "limit=x"):
        assert (await browser.get(f"/runs/{FIRST}/log.json?{wrong}")).status_code == 400
