"""Every payload that was ever released can still be decoded, and its fields keep their values."""

import json
from pathlib import Path

import pytest

from schemas.envelope import decode_event
from schemas.events import ALL_EVENTS, EVENT_TYPES
from schemas.events.upcasts import UPCASTS
from tests.kit.examples import GOLDEN, golden_name

PAYLOADS = sorted(GOLDEN.glob("*.json"))


def test_every_event_has_a_golden_payload() -> None:
    missing = [golden_name(e) for e in ALL_EVENTS if not (GOLDEN / golden_name(e)).exists()]
    assert not missing, f"write them with `python -m tests.kit.examples`: {missing}"


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_golden_payloads_decode(path: Path) -> None:
    event_type, _, version = path.stem.rpartition(".v")
    payload = json.loads(path.read_text())
    event = decode_event(event_type, int(version), path.read_text())
    assert_says(json.loads(event.model_dump_json()), payload)


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_golden_payloads_decode_in_a_release_that_raises_their_version(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event_type, _, version = path.stem.rpartition(".v")
    event = decode_event(event_type, int(version), path.read_text())
    kind = EVENT_TYPES[event_type]
    monkeypatch.setitem(UPCASTS, (event_type, kind.version), lambda payload: payload)
    monkeypatch.setattr(kind, "version", kind.version + 1)
    assert decode_event(event_type, int(version), path.read_text()) == event


def assert_says(now: object, then: object) -> None:
    """Every field of the old payload is still there; newer fields may be added."""
    if isinstance(then, dict):
        assert isinstance(now, dict)
        for key, value in then.items():
            assert_says(now[key], value)
    elif isinstance(then, list):
        assert isinstance(now, list)
        assert len(now) == len(then)
        for ours, theirs in zip(now, then, strict=True):
            assert_says(ours, theirs)
    else:
        assert now == then
