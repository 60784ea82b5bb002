"""Upcasts with a worked example: how an old version of an event's payload is retired."""

import json

import pytest

from schemas.envelope import BadEvent, NewerEvent, decode_event
from schemas.events.upcasts import Payload, upcast


def test_a_retired_payload_walks_up_step_by_step() -> None:
    # The example: version 1 said `seconds`, version 2 said `duration_s`, version 3 made it a float.
    def to_2(payload: Payload) -> Payload:
        rest = {key: value for key, value in payload.items() if key != "seconds"}
        return {**rest, "duration_s": payload["seconds"]}

    def to_3(payload: Payload) -> Payload:
        return {**payload, "duration_s": float(str(payload["duration_s"]))}

    chain = {("rl.example", 1): to_2, ("rl.example", 2): to_3}
    old = {"run": "r", "seconds": 5}
    new = upcast("rl.example", 1, old, current=3, upcasts=chain)
    assert new == {"run": "r", "duration_s": 5.0}
    assert upcast("rl.example", 3, new, current=3, upcasts=chain) == new
    with pytest.raises(KeyError):
        upcast("rl.example", 1, old, current=4, upcasts=chain)


def test_foreign_types_and_future_versions_are_told_apart() -> None:
    with pytest.raises(NewerEvent, match="knows no such event"):
        decode_event("com.example.other", 1, "{}")
    with pytest.raises(NewerEvent, match="version 99"):
        decode_event("rl.run.warned", 99, "{}")
    with pytest.raises(BadEvent):
        decode_event("rl.run.warned", 1, json.dumps({"run": 1}))


def test_unknown_fields_of_a_newer_minor_are_ignored() -> None:
    payload = {"run": "r", "step": 1, "message": "m", "colour": "blue"}
    assert decode_event("rl.run.warned", 1, json.dumps(payload)).run_id == "r"
