"""The state of a run at each of its events, and a search in them."""

from collections.abc import AsyncIterator
from itertools import chain

import httpx
import pytest

from infra.spine.ports.event_log import Cursor
from producers.core.history.run_state import changes, run_state_at
from producers.core.history.run_status import TELLING
from producers.dashboard.pages import history
from schemas.events import (
    ALL_EVENTS,
    Event,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunResumed,
    RunResumeRequested,
    RunStopped,
    RunStopRequested,
)
from tests.kit.application import Application
from tests.kit.signed_in import signed_in
from tests.kit.story import beginning, step

pytestmark = pytest.mark.postgres

SAME_STATUS = {
    "rl.run.requested",
    "rl.run.approved",
    "rl.run.renamed",
    "rl.run.deleted",
    "rl.run.restored",
    "rl.run.warned",
}


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    await app.append([*beginning("r", "first", steps=9)])
    for number in (1, 2, 3):
        await app.append([*step("r", number)])
    await app.append([RunPaused(run="r", step=3, reason="a person"), RunResumed(run="r", step=3)])
    await app.append([RunFailed(run="r", kind="error", message="out of memory")])
    async with signed_in(app) as client:
        yield client


def test_every_event_of_a_run_has_a_status_or_changes_none() -> None:
    types = {kind.type for kind in ALL_EVENTS if kind.type.startswith("rl.run.")}
    assert types == {kind.type for kind in TELLING} | SAME_STATUS


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
    for wrong, status in (("0-1", 404), ("f" * 30 + "-1", 400), ("nonsense", 400)):
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


async def test_a_status_follows_from_all_events_that_decide_it(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=9)])
    commands: list[tuple[Event, str]] = [
        (RunPauseRequested(run="r"), "running, to be paused"),
        (RunPaused(run="r", step=1, reason="a person"), "paused"),
        (RunResumeRequested(run="r"), "paused, to be resumed"),
        (RunResumed(run="r", step=1), "running"),
        (RunPauseRequested(run="r"), "running, to be paused"),
        (RunPaused(run="r", step=1), "paused"),
        (RunStopRequested(run="r"), "paused, to be stopped"),
        (RunStopped(run="r", step=1), "stopped"),
    ]
    for event, _ in commands:
        await app.append([event])
    states = await _states(app, [event.type for event, _ in commands])
    assert [state["status"] for state in states] == [status for _, status in commands]
    assert ["reason" in state for state in states] == [False, True, True, *[False] * 5]


async def test_a_crash_is_no_failure(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=9)])
    await app.append([RunFailed(run="r", kind="crash", message="the learner was lost")])
    [state] = await _states(app, ["rl.run.failed"])
    assert (state["status"], state["error"]) == ("crashed", "the learner was lost")


async def _states(app: Application, types: list[str]) -> list[dict[str, object]]:
    """The states at the events of these types, in their order."""
    found = await app.services.log.read("r", after=Cursor(), limit=100, types=types)
    core, states = app.services, list[dict[str, object]]()
    for one in await core.log.read("r", after=Cursor(), limit=100):
        state = await run_state_at(core.readmodel.state_at_event, core.log, "r", one.cursor)
        if one in found:
            states.append(dict(state))
    return states


async def test_pages_of_events_lead_forward_and_back(browser: httpx.AsyncClient) -> None:
    everything = (await browser.get("/runs/first/events.json?limit=500")).json()
    assert (everything["previous"], everything["next"]) == (None, None)
    wanted = [one["id"] for one in everything["events"]]

    async def walk(query: str, link: str) -> list[list[str]]:
        pages = []
        while True:
            page = (await browser.get(f"/runs/first/events.json?limit=7{query}")).json()
            pages.append([one["id"] for one in page["events"]])
            if page[link] is None:
                return pages
            query = f"&{'after' if link == 'next' else 'before'}={page[link]}"

    forward = await walk("", "next")
    assert [*chain(*forward)] == wanted
    back = await walk("&before=end", "previous")
    assert [*chain(*reversed(back))] == wanted
    assert len(back[0]) == 7, "the newest page is full"
    page = (await browser.get("/runs/first/events?limit=7&before=end&types=")).text
    assert 'rel="prev"' in page
    assert 'rel="next"' not in page
    assert (await browser.get("/runs/first/events?before=nonsense")).status_code == 400


async def test_an_event_of_a_later_version_is_left_out_and_ends_no_page(
    app: Application, browser: httpx.AsyncClient
) -> None:
    before = (await browser.get("/runs/first/events.json?limit=500")).json()["events"]
    await app.database.durable.execute(
        """insert into events
        (id, stream, version, type, schema_version, data, run_id, causation, correlation)
        select gen_random_uuid(), 'later-r', n, 'rl.later.thing', 1, '{}', 'r', gen_random_uuid(),
        gen_random_uuid() from generate_series(1, 3) n""",
    )
    await app.append([RunFinished(run="r", step=3, reward=None)])
    first = (await browser.get(f"/runs/first/events.json?limit={len(before)}")).json()
    assert len(first["events"]) == len(before)
    last = (await browser.get(f"/runs/first/events.json?after={first['next']}")).json()["events"]
    assert [one["type"] for one in last] == ["rl.run.finished"]
    page = (await browser.get(f"/runs/r/at/{last[0]['cursor']}/state.json")).json()
    assert page["previous"] == before[-1]["cursor"]


async def test_a_search_that_finds_nothing_yet_says_how_far_it_looked(
    browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SEARCHED_EVENTS", 2)
    page = (await browser.get("/runs/first/events?search=out of memory")).text
    assert "No event matches among 6 events" in page
    assert 'rel="next"' in page
