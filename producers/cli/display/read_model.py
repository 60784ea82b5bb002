"""Describes the state of the read model, from the key `read_model` of GET /status."""

from collections.abc import Mapping
from typing import Any


def skipped_events(read_model: Mapping[str, Any]) -> str:
    """A description of the skipped events: how many there are, and the first one with its error."""
    first = read_model["skipped_events"][0]
    count = read_model["skipped"]
    events = "1 event" if count == 1 else f"{count} events"
    return f"{events}, the first of them {first['type']} ({first['event']}): {first['error']}"


def description(read_model: object) -> str:
    """One line about the read model, for `headrace status`."""
    if not isinstance(read_model, dict):
        return "unknown to this server"
    behind = read_model["behind"]
    if not read_model["skipped"]:
        return f"complete, {behind} events behind"
    skipped = skipped_events(read_model)
    return f"{behind} events behind, and lacks {skipped}; `headrace doctor` says what to do"
