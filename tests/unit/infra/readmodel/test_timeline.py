"""The phases of steps are read from the log, however long it is."""

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import pytest

from infra.readmodel.timeline import Timelines
from schemas.events import RunPaused, RunResumed
from schemas.ids import StreamName
from tests.kit.application import Application, application
from tests.kit.story import beginning, step

pytestmark = pytest.mark.postgres


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        yield served


async def test_each_phase_lies_between_its_events(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=9)])
    for number in range(1, 10):
        await app.append([*step("r", number)])
    log = await app.services.log.load({StreamName("run-r"): 0, StreamName("policy-r"): 0})
    times = {
        (recorded.type, getattr(recorded.event, "step", 0)): recorded.time
        for stream in log.values()
        for recorded in stream
    }
    found, _ = await Timelines(app.database).steps("r", first=4, last=6, ahead=0)
    assert [one.step for one in found] == [4, 5, 6]
    for one in found:
        assert one.groups == 2
        assert [*one.spans] == ["generate", "grade", "learn", "publish"]
        learn, publish = one.spans["learn"], one.spans["publish"]
        assert learn.begin == times["rl.batch.assembled", one.step]
        assert learn.end == publish.begin == times["rl.policy.updated", one.step]
        assert publish.end == times["rl.step.settled", one.step]
        assert one.spans["generate"].begin == times["rl.groups.requested", one.step]
        assert all(span.end is not None and span.begin <= span.end for span in one.spans.values())


async def test_a_step_that_was_sampled_ahead_is_whole(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=4)])
    first, second = [*step("r", 1)], [*step("r", 2)]
    for events in ([first[0], second[0]], first[1:], second[1:]):
        await app.append(events)
    (cut,), _ = await Timelines(app.database).steps("r", first=2, last=2, ahead=0)
    assert "generate" not in cut.spans
    (whole,), _ = await Timelines(app.database).steps("r", first=2, last=2, ahead=1)
    assert isinstance(whole.spans["generate"].begin, datetime)


async def test_steps_without_events_are_absent(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=9)])
    assert await Timelines(app.database).steps("r", first=1, last=20, ahead=4) == ([], 20)
    begun = [*step("r", 1)][:2]
    await app.append(begun)
    (open_step,), _ = await Timelines(app.database).steps("r", first=1, last=20, ahead=4)
    assert open_step.spans["generate"].end is None or open_step.groups == 0


async def test_other_events_between_do_not_hide_a_step(app: Application) -> None:
    await app.append([*beginning("r", "first", steps=9)])
    for number in range(1, 30):
        await app.append([*step("r", number)])
        if number % 3:
            await app.append([RunPaused(run="r", step=number), RunResumed(run="r", step=number)])
    for number in range(1, 30):
        (one,), _ = await Timelines(app.database).steps("r", first=number, last=number, ahead=0)
        assert (one.step, one.groups) == (number, 2)
