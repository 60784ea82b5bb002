"""New points of a run: every viewer gets each of them once, and nothing is read for nobody."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from producers.dashboard.live import MOST_WAITING, LiveRuns
from producers.dashboard.pages.runs import REWARD
from schemas.events import Event
from tests.kit.application import Application
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
    live = LiveRuns(app.services.readmodel.runs, every_s=0.01)
    viewers = [asyncio.ensure_future(collect(live.messages("r1", (REWARD,)))) for _ in range(3)]
    while live.num_viewers < len(viewers):
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
    assert live.num_viewers == 0
    assert live.num_runs == 0


async def test_a_viewer_that_does_not_read_loses_its_stream(app: Application) -> None:
    first, _ = split_story()
    await app.append(first)
    live = LiveRuns(app.services.readmodel.runs, every_s=0.01)
    messages = live.messages("r1", (REWARD,))
    assert await asyncio.wait_for(anext(messages), WITHIN_S)
    for _ in range(MOST_WAITING + 1):
        live.send("r1", b"event: points\n\n")
    rest = [message async for message in messages]
    assert len(rest) < MOST_WAITING
    assert live.num_runs == 0


async def test_nothing_is_read_for_nobody(app: Application) -> None:
    first, _ = split_story()
    await app.append(first)
    live = LiveRuns(app.services.readmodel.runs, every_s=0.01)
    messages = live.messages("r1", (REWARD,))
    assert await asyncio.wait_for(anext(messages), WITHIN_S)
    assert live.num_runs == 1
    await messages.aclose()
    assert live.num_runs == 0
