"""The page of costs, and the costs on the page of a run."""

from uuid import uuid4

import httpx
import pytest

from schemas.costs.work import Work
from schemas.events import PolicyUpdated
from tests.kit.application import Application
from tests.kit.story import whole_run
from tests.kit.tenants import tenant

pytestmark = pytest.mark.postgres


async def test_the_pages_show_what_a_run_cost_and_what_was_wasted(
    app: Application, browser: httpx.AsyncClient
) -> None:
    owner = await tenant(app, "a", "/repo")
    assert "Nothing has cost anything yet" not in (await browser.get("/")).text
    steps = [e for e in whole_run(owner.run, "any", steps=1) if isinstance(e, PolicyUpdated)]
    work = Work(effect="TrainStep", device="gpu.H100", device_s=7200.0, wasted_s=60.0)
    event = steps[0].model_copy(update={"step": 99, "work": work})
    await app.services.log.append([event], cause=uuid4())
    await app.services.readmodel.caught_up(await app.services.log.visible_head())
    page = (await browser.get("/cost?by=workspace")).text
    assert "no price for gpu.H100" in page
    assert "TrainStep 1 min" in page
    assert f'href="/runs/{owner.run}"' in (await browser.get("/cost")).text
    shown = (await browser.get(f"/runs/{owner.run}")).text
    assert "<dt>gpu.H100</dt><dd>2 h 1 min</dd>" in shown
    assert "Wasted by TrainStep" in shown
    assert (await browser.get("/cost?by=nothing")).status_code == 400
