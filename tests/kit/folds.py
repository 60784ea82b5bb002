"""Fingerprints of the states that each consumer folds from a recorded history, by fold version.

A snapshot holds a folded state under its consumer's `fold_version`. If a fold changed without a change
of that number, it would continue from a state of the old fold. `python -m tests.kit.folds` records
missing fingerprints, and never changes existing ones.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from consumers.registry import REGISTRY, load
from infra.spine.runtime.consumer import AnyConsumer
from schemas.envelope import decode_event
from schemas.events import EVENT_TYPES, CommitRequested, Event, RunRequested
from tests.kit import virtual
from tests.kit.examples import GOLDEN

HISTORY = GOLDEN / "folds" / "history.jsonl"
"""A short run with a validation: each event with its stream, in the order of the log."""

FINGERPRINTS = GOLDEN / "folds" / "fingerprints.json"


def fingerprints(consumer: AnyConsumer) -> dict[str, str]:
    """A hash of the states that the consumer folds from the history, and one for each event that was
    ever released, alone. An event that it cannot fold counts by its error's class."""
    told: list[str] = []
    for stream in streams().values():
        if _owns(consumer, stream[0]):
            told += _states(consumer, stream)
    alone = {n: _states(consumer, [e]) for n, e in golden_events().items() if _owns(consumer, e)}
    return {name: _hash(states) for name, states in {"history": told, **alone}.items()}


def _owns(consumer: AnyConsumer, event: Event) -> bool:
    return event.stream.partition("-")[0] == consumer.category


def _hash(states: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(states).encode()).hexdigest()[:16]


def _states(consumer: AnyConsumer, events: Sequence[Event]) -> list[str]:
    """The state after each event, as JSON. Defaults are left out, so that a new field that is never set
    does not change it."""
    kind = TypeAdapter(consumer.snapshots or type(consumer.initial))
    state, told = consumer.initial, []
    for event in events:
        try:
            state = consumer.evolve(state, event)
        except Exception as error:
            told.append(type(error).__name__)
            break
        shown = kind.dump_python(state, mode="json", exclude_defaults=True)
        told.append(json.dumps(shown, sort_keys=True))
    return told


def streams() -> Mapping[str, list[Event]]:
    """The events of the history, by stream."""
    found: dict[str, list[Event]] = {}
    for line in HISTORY.read_text().splitlines():
        kind, version, data = json.loads(line)
        event = decode_event(kind, version, json.dumps(data))
        found.setdefault(event.stream, []).append(event)
    return found


def golden_events() -> dict[str, Event]:
    """The golden payloads of all events that there are."""
    found = {}
    for path in sorted(GOLDEN.glob("*.json")):
        kind, _, version = path.stem.rpartition(".v")
        if kind in EVENT_TYPES:
            found[path.stem] = decode_event(kind, int(version), path.read_text())
    return found


def read_fingerprints() -> dict[str, dict[str, dict[str, str]]]:
    """Consumer -> fold version -> name of the folded events -> hash."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(FINGERPRINTS.read_text())
    return found


def record() -> None:
    """Record the fingerprints that are missing."""
    HISTORY.parent.mkdir(exist_ok=True)
    if not HISTORY.exists():
        _write_history(HISTORY)
    known = read_fingerprints() if FINGERPRINTS.exists() else {}
    for name in REGISTRY:
        consumer = load(name)
        versions = known.setdefault(name, {})
        before = versions.get(str(consumer.fold_version), {})
        versions[str(consumer.fold_version)] = {**fingerprints(consumer), **before}
    FINGERPRINTS.write_text(json.dumps(known, indent=2) + "\n")


def _write_history(file: Path) -> None:
    from tests.kit.several import ALONE, world_of
    from tests.properties.test_cascade import events

    asked: list[Event] = []
    for event in events("sync"):
        if isinstance(event, RunRequested):
            shorter = event.config.advanced.model_copy(update={"max_steps": 2})
            config = event.config.model_copy(update={"advanced": shorter})
            asked.append(event.model_copy(update={"config": config}))
        else:
            assert isinstance(event, CommitRequested)
            asked.append(event)
    world = virtual.run(world_of(ALONE, asked))
    lines = [
        json.dumps([r.event.type, r.event.version, json.loads(r.event.model_dump_json())])
        for r in world.events
    ]
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    record()
