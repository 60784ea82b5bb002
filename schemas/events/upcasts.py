"""Converts payloads of retired versions to the current version, with one function per retired version.

`UPCASTS[(type, version)]` turns a payload of that version into one of `version + 1`. No version was
retired yet. tests/unit/schemas/events/test_upcasts.py holds a worked example.
"""

from collections.abc import Callable, Mapping

Payload = Mapping[str, object]
Upcast = Callable[[Payload], Payload]

UPCASTS: dict[tuple[str, int], Upcast] = {}


def upcast(
    event_type: str,
    version: int,
    payload: Payload,
    *,
    current: int,
    upcasts: Mapping[tuple[str, int], Upcast] = UPCASTS,
) -> Payload:
    """Convert a payload of `version` to version `current`. Raises KeyError when `upcasts` has no
    function for a version in between."""
    for step in range(version, current):
        payload = upcasts[(event_type, step)](payload)
    return payload
