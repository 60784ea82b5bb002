"""Comparing what logs hold."""

import hashlib
from collections.abc import Iterable

from infra.ports.event_log import Recorded


def fingerprint(events: Iterable[Recorded]) -> str:
    """One hash of all streams: equal logs tell the same story, in whatever order it was told."""
    told = sorted(f"{r.stream}/{r.version}/{r.id}/{r.event.model_dump_json()}" for r in events)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
