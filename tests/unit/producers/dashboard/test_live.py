"""New points of a run: every viewer gets each of them once, and nothing is read for nobody."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from infra.readmodel.runs import Runs
from infra.spine.postgres.errors import DatabaseUnavailable
from producers.core.history.metric_titles import VALIDATION
from producers.dashboard import live
from producers.dashboard.formats import number
from producers.dashboard.live import MOST_WAITING, LiveRuns
from producers.dashboard.pages.run import DRAWN, INTERVAL
from producers.dashboard.pages.runs import REWARD
from schemas.events import EvaluationSettled, Event
from tests.kit.application import API_KEY, Application
from tests.kit.signed_in import sign_in
from tests.kit.story import whole_run

pytestmark = pytest.mark.postgres
WITHIN_S = 30


def split_story() -> tuple[list[Event], list[Event]]:
    """The events of a run before its first metrics, and the rest."""
    events = list(whole_run("r1", "first", steps=3))
    at = next(n for n, event in enumerate(events) if event.type == "rl.policy.updated") + 1
    return events[:at], events[at:]


async def collect(messages: AsyncIterator[bytes | None]) -> list[dict[str, Any]]:
    """All messages of a stream until it ends."""
    found = []
    async with asyncio.timeout(WITHIN_S):
        async for message in messages:
            if message is not None:
                data = message.decode().partition("data: ")[2]
                found.append(json.loads(data))
    return found


async def test_viewers_get_each_new_point_once_until_the_run_ends(app: Application) -> None:
    first, rest = split_story()
    await app.append(first)
    runs = LiveRuns(app.services.readmodel.runs, clock=app.services.clock, every_s=0.01)
    viewers = [asyncio.ensure_future(collect(runs.messages("r1", (REWARD,)))) for _ in range(3)]
    while runs.num_viewers < len(viewers):
        await asyncio.sleep(0)
    for event in rest:
        await app.append([event])
    received = await asyncio.gather(*viewers)
    stored = await app.services.readmodel.runs.curve("r1", REWARD)
    before = len(stored) - len([p for m in received[0] for p in m["points"].get(REWARD, [])])
    assert before in (0, 1)  # the first step may have ended before the first look
    for messages in received:
        points = [
            tuple(point) for message in messages for point in message["points"].get(REWARD, [])
        ]
        assert points == stored[before:]
        assert messages[-1]["status"] == "finished"
        assert messages[-1]["state"] == "finished, complete"
        assert messages[-1]["progress"] == "step 3 of 3"
        assert len(messages[-1]["figures"]) == 13
        assert messages[-1]["figures"][4] == number(stored[-1][1])
    assert runs.num_viewers == 0
    assert runs.num_runs == 0


async def test_a_held_out_reward_comes_with_its_interval(app: Application) -> None:
    first, rest = split_story()
    await app.append(first)
    runs = LiveRuns(app.services.readmodel.runs, clock=app.services.clock, every_s=0.01)
    viewer = asyncio.ensure_future(collect(runs.messages("r1", DRAWN)))
    while not runs.num_viewers:
        await asyncio.sleep(0)
    metrics = {"eval/reward/low": 0.25, "eval/reward/high": 0.75}
    settled = EvaluationSettled(run="r1", step=1, reward=0.5, metrics=metrics)
    for event in (*rest[:-1], settled, rest[-1]):
        await app.append([event])
    messages = await viewer
    points = [message["points"] for message in messages]
    [ends] = [[one[key] for key in INTERVAL] for one in points if INTERVAL[0] in one]
    assert ends == [[[1, 0.25]], [[1, 0.75]]]
    assert (messages[-1]["figures"][5], messages[-1]["intervals"][5]) == ("0.5", "0.25 to 0.75")
    assert messages[-1]["intervals"][4] is None


async def test_a_viewer_that_does_not_read_loses_its_stream(app: Application) -> None:
    first, _ = split_story()
    await app.append(first)
    runs = LiveRuns(app.services.readmodel.runs, clock=app.services.clock, every_s=0.01)
    messages = runs.messages("r1", (REWARD,))
    assert await asyncio.wait_for(anext(messages), WITHIN_S) is None
    for _ in range(MOST_WAITING + 1):
        runs.send("r1", b"event: points\n\n")
    rest = [message async for message in messages]
    assert len(rest) < MOST_WAITING
    assert runs.num_runs == 0


async def test_nothing_is_read_for_nobody(app: Application) -> None:
    first, _ = split_story()
    await app.append(first)
    runs = LiveRuns(app.services.readmodel.runs, clock=app.services.clock, every_s=0.01)
    messages = runs.messages("r1", (REWARD,))
    assert await asyncio.wait_for(anext(messages), WITHIN_S) is None
    assert runs.num_runs == 1
    await messages.aclose()
    assert runs.num_runs == 0


async def test_a_browser_that_slept_gets_what_it_missed(app: Application) -> None:
    """It sends the id of the last message, and gets that step again and everything after it."""
    first, rest = split_story()
    for event in (*first, *rest[:-1]):  # all but the end of the run
        await app.append([event])
    runs = LiveRuns(app.services.readmodel.runs, clock=app.services.clock, every_s=0.01)
    stored = await app.services.readmodel.runs.curve("r1", REWARD)
    messages = runs.messages("r1", (REWARD,), known=stored[1][0])
    assert await asyncio.wait_for(anext(messages), WITHIN_S) is None
    missed = await asyncio.wait_for(anext(messages), WITHIN_S)
    assert missed is not None
    [points] = await collect(_only(missed))
    assert [tuple(point) for point in points["points"][REWARD]] == stored[1:]
    assert f"id: {stored[-1][0]}\n" in missed.decode()
    await messages.aclose()


async def test_a_validation_that_is_later_than_other_steps_is_not_missed(app: Application) -> None:
    """The browser knows step 3 when the validation after step 1 ends."""
    first, rest = split_story()
    for event in (*first, *rest[:-1]):
        await app.append([event])
    late = "insert into metric_points values ('r1', $1, 1, 0.5, now())"
    for key in (VALIDATION, *INTERVAL):
        await app.database.durable.execute(late, key)
    runs = LiveRuns(app.services.readmodel.runs, clock=app.services.clock, every_s=0.01)
    missed = await runs.read_missed("r1", DRAWN, 3)
    [found] = await collect(_only(missed))
    assert [found["points"][key] for key in INTERVAL] == [[[1, 0.5]]] * 2
    assert found["points"][VALIDATION] == [[1, 0.5]]
    assert [step for step, _ in found["points"][REWARD]] == [3]
    assert "id: 3\n" in missed.decode()


async def test_a_stream_ends_with_its_session(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SESSION_CHECKED_S", 0.0)
    first, rest = split_story()
    await app.append(first)
    transport = httpx.ASGITransport(app.app)
    here = "http://127.0.0.1"
    async with httpx.AsyncClient(transport=transport, base_url=here) as browser:
        browser.headers["Origin"] = here
        await sign_in(browser, API_KEY)
        following = asyncio.ensure_future(browser.get("/runs/r1/live"))
        while not hasattr(app.app.state, "live_runs") or not app.app.state.live_runs.num_viewers:
            await asyncio.sleep(0.01)
        await app.database.durable.execute("delete from browser_sessions")
        await app.append(rest[:2])
        answer = await asyncio.wait_for(following, WITHIN_S)
    assert answer.status_code == 200
    assert "rollout/raw_reward" not in answer.text


async def _only(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def test_one_that_slept_over_the_end_gets_the_rest_once(app: Application) -> None:
    first, rest = split_story()
    for event in (*first, *rest):
        await app.append([event])
    path = "/runs/r1/live"
    assert (await app.api.get(path)).status_code == 204
    woken = await app.api.get(path, headers={"Last-Event-ID": "1"})
    assert woken.status_code == 200
    assert woken.headers["content-type"].startswith("text/event-stream")
    last = woken.text.partition("id: ")[2].partition("\n")[0]
    assert last == "3-end"
    data = json.loads(woken.text.partition("data: ")[2])
    assert [step for step, _ in data["points"][REWARD]] == [1, 2, 3]
    assert (await app.api.get(path, headers={"Last-Event-ID": last})).status_code == 204
    for wrong in ("x", "-1", "9" * 30, "1-end-end"):
        assert (await app.api.get(path, headers={"Last-Event-ID": wrong})).status_code == 204


class AwayRuns(Runs):
    """A read model whose database goes away."""

    async def new_points(
        self, run: str, last: Mapping[str, int]
    ) -> dict[str, list[tuple[int, float]]]:
        raise DatabaseUnavailable("the database does not answer")


async def test_streams_end_when_the_database_goes_away(app: Application) -> None:
    first, _ = split_story()
    await app.append(first)
    runs = LiveRuns(AwayRuns(app.database), clock=app.services.clock, every_s=0.01)
    async with asyncio.timeout(WITHIN_S):
        assert [one async for one in runs.messages("r1", (REWARD,))] == [None]
    assert runs.num_runs == 0
