"""Every payload that was ever released can still be decoded, and its fields keep their values."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from schemas.envelope import decode_event
from schemas.events import ALL_EVENTS, EVENT_TYPES
from schemas.events.upcasts import UPCASTS
from tests.kit.examples import GOLDEN, golden_name

PAYLOADS = sorted(GOLDEN.glob("*.json"))

NEW_FIELDS = {
    ("rl.hub-push.cancel-requested", 1): {"push": "upload"},
    ("rl.hub-push.failed", 1): {"push": "upload"},
    ("rl.hub-push.pushed", 1): {"push": "upload"},
    ("rl.hub-push.requested", 1): {"push": "upload"},
    ("rl.workspace.connected", 1): {"provider": "forge"},
    ("rl.workspace.hook-pinged", 1): {"provider": "forge"},
    ("rl.workspace.packages-chosen", 1): {"push": "request"},
    ("rl.workspace.push-received", 1): {"provider": "forge"},
    ("rl.workspace.rejected", 1): {"push": "request"},
    ("rl.workspace.synced", 1): {"push": "request"},
}
"""Type and version of an event -> its fields that have another name today."""


def test_every_event_has_a_golden_payload() -> None:
    missing = [golden_name(e) for e in ALL_EVENTS if not (GOLDEN / golden_name(e)).exists()]
    assert not missing, f"write them with `python -m tests.kit.examples`: {missing}"


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_golden_payloads_decode(path: Path) -> None:
    event_type, _, version = path.stem.rpartition(".v")
    payload = json.loads(path.read_text())
    event = decode_event(event_type, int(version), path.read_text())
    new = NEW_FIELDS.get((event_type, int(version)), {})
    assert_says(json.loads(event.model_dump_json()), renamed(payload, new))


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_golden_payloads_decode_in_a_release_that_raises_their_version(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event_type, _, version = path.stem.rpartition(".v")
    event = decode_event(event_type, int(version), path.read_text())
    kind = EVENT_TYPES[event_type]
    monkeypatch.setitem(UPCASTS, (kind.type, kind.version), lambda payload: payload)
    monkeypatch.setattr(kind, "version", kind.version + 1)
    assert decode_event(event_type, int(version), path.read_text()) == event


def renamed(value: object, new: Mapping[str, str]) -> object:
    """A payload with the new names of its fields, also inside of others."""
    if not isinstance(value, dict):
        return value
    return {new.get(name, name): renamed(each, new) for name, each in value.items()}


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
