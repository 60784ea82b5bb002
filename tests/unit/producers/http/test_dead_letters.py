"""Dead letters over the API: listed, shown whole, retried, and shown in the state of their run."""

import asyncio
import base64
import json
from uuid import uuid4

from infra.spine.ports.effects import Claimed
from infra.spine.ports.event_log import Cursor, EventLog, Recorded
from infra.spine.runtime.dead_letters import dead_letter_message, dead_letter_outcome
from schemas.errors import Conflict
from schemas.events import MessageDeadLettered, RunPaused, RunResumed, RunWarned
from schemas.ids import ConsumerName, StreamName
from tests.kit.application import Application
from tests.kit.hosting import effect
from tests.kit.story import beginning


async def poisoned(app: Application, run: str = "r1", *, pauses: bool = True) -> Recorded:
    """A message of a run that `grade` could not decide on."""
    log = app.services.log
    warned = RunWarned(run=run, step=1, message="x")
    [message] = await log.append([warned], cause=uuid4(), traceparent="00-ab-cd-01")
    await dead_letter_message(
        log, ConsumerName("grade"), message, ValueError("a bug"), pauses=pauses
    )
    letter = await last_of(log, MessageDeadLettered.type)
    assert await app.services.readmodel.caught_up(letter.cursor)
    return letter


async def last_of(log: EventLog, kind: str) -> Recorded:
    """The log's last event, once it is of this kind; the tail waits for writers that have not
    committed."""
    async with asyncio.timeout(90):
        while True:
            found, _ = await log.tail(Cursor(), limit=500)
            if found and found[-1].type == kind:
                return found[-1]
            await asyncio.sleep(0.01)


async def test_a_letter_is_listed_and_shown_with_everything(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    letter = await poisoned(app)
    listed = await app.get("/dead-letters")
    assert listed["total_count"] == 1
    assert listed["dead_letters"][0]["id"] == str(letter.id)
    assert (await app.get("/dead-letters", about="another"))["total_count"] == 0
    shown = (await app.get(f"/dead-letters/{str(letter.id)[:13]}"))["dead_letter"]
    data = json.loads(base64.b64decode(shown["bytes_base64"]))
    assert data == {"run": "r1", "step": 1, "message": "x", "about": "run"}
    assert shown["cause"] == "a bug"
    assert shown["traceparent"] == "00-ab-cd-01"
    assert shown["headers"]["ce_type"] == "rl.run.warned"
    assert shown["redriven_at"] is None


async def test_a_held_run_is_paused_with_the_reason_until_it_is_driven_again(
    app: Application,
) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    letter = await poisoned(app)
    run = (await app.get("/runs/r1"))["run"]
    assert (run["status"], run["phase"]) == ("running", "paused")
    assert "a bug" in run["error"]
    assert str(letter.id) in run["error"]
    refused = await app.post("/runs/r1/resume", {})
    assert refused.status_code == 409
    assert f"dlq redrive {letter.id}" in refused.json()["detail"]
    driven = await app.post(f"/dead-letters/{letter.id}/redrive", {})
    assert driven.status_code == 200, driven.text
    assert driven.json()["dead_letter"]["redriven_at"]
    run = (await app.get("/runs/r1"))["run"]
    assert (run["phase"], run["error"]) != ("paused", None)
    assert run["error"] is None
    assert (await app.get("/dead-letters"))["total_count"] == 0
    assert (await app.get("/dead-letters", status="all"))["total_count"] == 1
    logs = [line["message"] for line in (await app.get("/runs/r1/logs"))["logs"]]
    assert any("dead letter" in line for line in logs)


async def test_an_outcome_that_was_put_aside_is_driven_again(app: Application) -> None:
    """It never was an event. It was refused as a message of a run that was archived or deleted."""
    await app.append(list(beginning("r1", "first", steps=2)))
    claimed = Claimed(
        id=effect("r1", 1).id,
        effect=effect("r1", 1),
        consumer=ConsumerName("sync"),
        stream=StreamName("workspace-r1"),
        correlation=uuid4(),
        traceparent=None,
        epoch=1,
        attempts=0,
        crashes=0,
    )
    await dead_letter_outcome(app.services.log, claimed, ValueError("a bug"))
    letter = await last_of(app.services.log, MessageDeadLettered.type)
    assert await app.services.readmodel.caught_up(letter.cursor)
    assert await app.services.effects.gates(["r1"]) == {"r1": "paused"}
    driven = await app.post(f"/dead-letters/{letter.id}/redrive", {})
    assert driven.status_code == 200, driven.text
    assert await app.services.effects.gates(["r1"]) == {"r1": "open"}


async def test_a_run_that_its_user_paused_stays_paused(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    letter = await poisoned(app)
    await app.append([RunPaused(run="r1", step=1)])
    driven = await app.post(f"/dead-letters/{letter.id}/redrive", {})
    assert driven.status_code == 200, driven.text
    assert (await app.get("/runs/r1"))["run"]["phase"] == "paused"
    assert await app.services.effects.gates(["r1"]) == {"r1": "paused"}
    await app.append([RunResumed(run="r1", step=1)])
    assert await app.services.effects.gates(["r1"]) == {"r1": "open"}


async def test_a_letter_is_driven_once_and_strangers_are_refused(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    letter = await poisoned(app, pauses=False)
    first = await app.post(f"/dead-letters/{letter.id}/redrive", {})
    assert first.status_code == 200
    again = await app.post(f"/dead-letters/{letter.id}/redrive", {})
    assert again.status_code == 409
    assert "already" in again.json()["detail"]
    for unknown in (str(uuid4()), "x", "%25%25%25%25%25%25%25%25"):
        assert (await app.api.get(f"/api/v1/dead-letters/{unknown}")).status_code == 404
    assert (await app.api.get("/api/v1/dead-letters?status=new")).status_code == 400


async def test_two_redrives_at_the_same_time_are_one(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    letter = await poisoned(app)
    asked = (app.services.dead_letters.redrive(str(letter.id)) for _ in range(5))
    told = await asyncio.gather(*asked, return_exceptions=True)
    # A request that looks after another has finished is refused; all accepted ones name one event.
    through = {a.id for a in told if not isinstance(a, BaseException)}
    assert len(through) == 1
    assert all(isinstance(a, Conflict) for a in told if isinstance(a, BaseException))
    assert await app.services.effects.gates(["r1"]) == {"r1": "open"}
    stream = await app.services.log.load({letter.stream: 0})
    assert [r.type for r in stream[letter.stream]] == [
        "rl.dead-letter.message",
        "rl.dead-letter.redriven",
    ]


async def test_the_metric_counts_those_that_wait(app: Application) -> None:
    await app.append(list(beginning("r1", "first", steps=2)))
    await poisoned(app)
    text = (await app.api.get("/metrics")).text
    assert "headrace_dead_letters 1" in text
