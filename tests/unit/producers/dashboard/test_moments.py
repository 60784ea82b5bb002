"""The state of a run at each of its events, and a search in them."""

from collections.abc import AsyncIterator

import httpx
import pytest

from producers.core.history.run_state import STATUSES, changes
from schemas.events import ALL_EVENTS, RunFailed, RunPaused, RunResumed
from tests.kit.application import TOKEN, Application
from tests.kit.story import beginning, step
from tests.unit.producers.dashboard.test_sign_in import HERE, sign_in

pytestmark = pytest.mark.postgres

SAME_STATUS = {"rl.run.renamed", "rl.run.deleted", "rl.run.warned"}


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    await app.append([*beginning("r", "first", steps=9)])
    for number in (1, 2, 3):
        await app.append([*step("r", number)])
    await app.append([RunPaused(run="r", step=3, reason="a person"), RunResumed(run="r", step=3)])
    await app.append([RunFailed(run="r", kind="error", message="out of memory")])
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as client:
        await sign_in(client, TOKEN)
        yield client


def test_every_event_of_a_run_has_a_status_or_changes_none() -> None:
    types = {kind.type for kind in ALL_EVENTS if kind.type.startswith("rl.run.")}
    assert types == {kind.type for kind in STATUSES} | SAME_STATUS


def test_changes_name_what_came_and_what_went() -> None:
    assert changes({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {
        "a": (1, None),
        "b": (2, 3),
        "c": (None, 4),
    }


async def test_the_state_follows_the_events_and_no_later_one(browser: httpx.AsyncClient) -> None:
    events = (await browser.get("/runs/first/events.json?limit=500")).json()["events"]
    states = []
    for event in events:
        found = (await browser.get(f"/runs/r/at/{event['cursor']}/state.json")).json()
        assert found["event"]["id"] == event["id"]
        states.append(found["state"])
    by_type = {event["type"]: state for event, state in zip(events, states, strict=True)}
    assert by_type["rl.run.requested"]["status"] == "pending"
    assert by_type["rl.run.paused"]["status"] == "paused"
    assert by_type["rl.run.paused"]["reason"] == "a person"
    assert by_type["rl.run.resumed"]["status"] == "running"
    assert by_type["rl.run.failed"]["error"] == "out of memory"
    settled = [
        state["step"]
        for event, state in zip(events, states, strict=True)
        if event["type"] == "rl.step.settled"
    ]
    assert settled == [1, 2, 3]
    steps = [state.get("step", 0) for state in states]
    assert steps == sorted(steps)


async def test_the_page_shows_what_changed_and_leads_on(browser: httpx.AsyncClient) -> None:
    events = (await browser.get("/runs/first/events.json?types=rl.step.settled")).json()["events"]
    cursor = events[1]["cursor"]
    page = (await browser.get(f"/runs/r/at/{cursor}")).text
    assert '<th scope="row">step</th><td>2</td><td class="dim">1</td>' in page
    assert 'rel="prev"' in page
    assert 'rel="next"' in page
    for wrong, status in (("0-1", 404), ("f" * 30 + "-1", 404), ("nonsense", 400)):
        assert (await browser.get(f"/runs/r/at/{wrong}")).status_code == status


async def test_events_are_searched(browser: httpx.AsyncClient) -> None:
    found = (await browser.get("/runs/first/events.json?search=OUT of mem")).json()["events"]
    assert [one["type"] for one in found] == ["rl.run.failed"]
    some = (await browser.get("/runs/first/events.json?search=step&limit=2")).json()
    assert len(some["events"]) == 2
    later = await browser.get(f"/runs/first/events.json?search=step&after={some['next']}")
    assert later.json()["events"][0]["cursor"] != some["events"][1]["cursor"]
    none = await browser.get("/runs/first/events?search=no such text")
    assert "No event matches" in none.text
