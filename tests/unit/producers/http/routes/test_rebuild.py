"""Events that the read model skipped: counted, shown, and repaired by a rebuild over HTTP."""

import asyncio
from typing import Any

import pytest

import consumers.project.consumer as projection
from infra.readmodel.rows import Write
from infra.spine.ports.event_log import Cursor, Recorded
from schemas.events import RunArchived, StepSettled
from tests.kit.application import Application
from tests.kit.history import ended_run
from tests.kit.prometheus import samples
from tests.kit.story import whole_run

pytestmark = pytest.mark.postgres

project = projection.project


def poisoned(recorded: Recorded) -> tuple[Write, ...]:
    if isinstance(recorded.event, StepSettled):
        raise ValueError("poison")
    return project(recorded)


async def metrics(app: Application) -> dict[tuple[str, ...], float]:
    answer = await app.api.get("/metrics")
    return samples(answer.text)["headrace_read_model_skipped_events"]


async def read_model(app: Application) -> dict[str, Any]:
    found: dict[str, Any] = (await app.get("/status"))["read_model"]
    return found


async def rebuilt(app: Application) -> dict[str, Any]:
    """Ask for a rebuild, and wait until every event is projected."""
    answer = await app.post("/rebuild", {})
    assert answer.status_code == 202
    async with asyncio.timeout(30):
        until = Cursor.parse(answer.json()["until"])
        while Cursor.parse((await read_model(app))["cursor"]) < until:
            await asyncio.sleep(0.01)
    document: dict[str, Any] = answer.json()
    return document


async def test_a_skipped_event_is_counted_and_shown_until_a_rebuild_after_the_mend(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as poison:
        poison.setattr(projection, "project", poisoned)
        for event in whole_run("r1", "first", steps=2):
            await app.append([event])
        assert await metrics(app) == {(StepSettled.type,): 2.0}
        found = await read_model(app)
        assert (found["behind"], found["skipped"]) == (0, 2)
        assert found["skipped_events"][0]["error"] == "ValueError: poison"
        assert (await rebuilt(app))["skipped"] == 2
        assert (await read_model(app))["skipped"] == 2, "the cause is still there"
    before = await app.get("/runs")
    assert (await rebuilt(app))["skipped"] == 2
    found = await read_model(app)
    assert (found["behind"], found["skipped"], found["skipped_events"]) == (0, 0, [])
    assert await metrics(app) == {(): 0.0}
    [run] = (await app.get("/runs"))["runs"]
    assert run["current_step"] == 2
    assert before["runs"][0]["current_step"] != 2


async def test_events_that_left_the_log_are_not_counted(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild could not bring back the rows of an archived run, so nobody is asked to run one."""
    monkeypatch.setattr(projection, "project", poisoned)
    await ended_run(app)
    assert (await read_model(app))["skipped"] > 0
    answer = await app.post("/runs/first/archive", {})
    assert answer.status_code == 200, answer.text
    events = await app.database.durable.fetchval(
        "select count(*) from events where type = $1", RunArchived.type
    )
    assert events == 1
    assert (await read_model(app))["skipped"] == 0
