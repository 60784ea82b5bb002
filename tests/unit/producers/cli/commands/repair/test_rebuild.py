"""`headrace rebuild`, and how status and doctor show what the read model skipped."""

from typing import Any

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Ran, Run

SKIPPED = {"event": "run-r1/7", "type": "StepSettled", "run": "r1", "error": "ValueError: poison"}


UNTIL = "2a-64"


def state(behind: int, skipped: int, *, cursor: str = UNTIL) -> dict[str, Any]:
    found = {"cursor": cursor, "behind": behind, "skipped": skipped}
    return {"read_model": {**found, "skipped_events": [SKIPPED] * min(skipped, 5)}}


def begun(skipped: int) -> dict[str, Any]:
    return {"rebuilding": True, "skipped": skipped, "until": UNTIL}


def doctor_check(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in ran.document["checks"] if c["name"] == "read model")
    return found


def test_it_waits_until_what_was_there_is_projected(headrace: Run, server: FakeServer) -> None:
    """Not until nothing is behind: runs go on, and append events all the time."""
    server.answer("POST", "/rebuild", begun(3), status=202)
    for cursor in ("0-0", "29-ffff", "2a-65"):
        server.answer("GET", "/status", state(10, 0, cursor=cursor))
    ran = headrace("rebuild")
    assert ran.code == 0, ran.err
    assert "it skipped 3 events before" in ran.out
    assert len(server.requests) == 4


def test_an_event_that_is_skipped_again_is_a_failure(headrace: Run, server: FakeServer) -> None:
    server.answer("POST", "/rebuild", begun(1), status=202)
    server.answer("GET", "/status", state(0, 1))
    ran = headrace("rebuild", "--json")
    assert ran.code == 1
    assert ran.error["code"] == "SKIPPED"
    assert "StepSettled (run-r1/7): ValueError: poison" in ran.error["message"]


def test_a_projector_that_does_not_get_on_is_named(
    headrace: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cli.commands.repair.rebuild.STALLED_S", 0.0)
    server.answer("POST", "/rebuild", begun(1), status=202)
    server.answer("GET", "/status", state(7, 0, cursor="0-0"))
    assert "lacks 7 events" in headrace("rebuild", "--json").error["message"]


@pytest.mark.parametrize("skipped", [0, 2])
def test_status_and_doctor_say_what_was_skipped_and_what_to_do(
    headrace: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    monkeypatch.setattr("producers.cli.client.Client.ready", lambda _: True)
    server.answer("GET", "/status", state(0, skipped))
    shown = " ".join(headrace("status").out.split())
    assert ("lacks 2 events" in shown) is bool(skipped)
    found = doctor_check(headrace("doctor", "--json"))
    assert found["ok"] is not bool(skipped)
    assert "run `headrace rebuild`" in found["fix"]
