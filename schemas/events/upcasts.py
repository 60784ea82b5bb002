"""Converts payloads of retired versions to the current version, with one function per retired version.

`UPCASTS[(type, version)]` turns a payload of that version into one of `version + 1`.
tests/unit/schemas/events/test_upcasts.py holds a worked example.
"""

from collections.abc import Callable, Mapping

Payload = Mapping[str, object]
Upcast = Callable[[Payload], Payload]


def rename_fields(**names: str) -> Upcast:
    """Return an upcast that gives fields new names: `rename_fields(old="new")`."""
    return lambda payload: {names.get(name, name): value for name, value in payload.items()}


def _to_hub_upload(payload: Payload) -> Payload:
    """The upload was called a push, in the event and in itself."""
    upload = rename_fields(push="upload")
    rest = {name: value for name, value in payload.items() if name != "push"}
    pushed = payload["push"]
    if not isinstance(pushed, dict):
        raise TypeError("push must be an object")
    return {**rest, "upload": upload(pushed)}


UPCASTS: dict[tuple[str, int], Upcast] = {
    ("rl.hub-upload.cancel-requested", 1): _to_hub_upload,
    ("rl.hub-upload.failed", 1): _to_hub_upload,
    ("rl.hub-upload.requested", 1): _to_hub_upload,
    ("rl.hub-upload.uploaded", 1): _to_hub_upload,
    ("rl.workspace.connected", 1): rename_fields(provider="forge"),
    ("rl.workspace.hook-pinged", 1): rename_fields(provider="forge"),
    ("rl.workspace.packages-chosen", 1): rename_fields(push="request"),
    ("rl.workspace.push-received", 1): rename_fields(provider="forge"),
    ("rl.workspace.rejected", 1): rename_fields(push="request"),
    ("rl.workspace.synced", 1): rename_fields(push="request"),
}


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
