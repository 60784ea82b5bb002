"""The values that a trigger sets in the TOML of its run: `set = { "training.lr" = 1e-4 }`."""

import json
from collections.abc import Mapping
from typing import Any

from schemas.toml.violations import violation

MOST_OVERRIDE_BYTES = 1024
"""The most bytes of a trigger's overrides in an event, where their JSON is a string. An event holds
those of all triggers that a push matches."""
DEEPEST = 8


def check_overrides(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides with each dotted key turned into tables. Raises an error for pydantic when a
    key is given twice or is not a key, or when there are too many."""
    nested: dict[str, Any] = {}
    _nest(overrides, into=nested, path=())
    if len(json.dumps(json.dumps(nested))) > MOST_OVERRIDE_BYTES:
        raise violation(f"must have at most {MOST_OVERRIDE_BYTES} bytes as JSON")
    return nested


def _nest(values: Mapping[str, Any], *, into: dict[str, Any], path: tuple[str, ...]) -> None:
    for key, value in values.items():
        parts = (*path, *key.split("."))
        if "" in parts or len(parts) > DEEPEST:
            raise violation(f'must have keys such as "training.lr", not {key[:64]!r}')
        if isinstance(value, Mapping):
            _nest(value, into=into, path=parts)
            continue
        table = into
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise violation(f"must not set {'.'.join(parts)[:64]!r} and the key above it")
        if parts[-1] in table:
            raise violation(f"must not set {'.'.join(parts)[:64]!r} twice")
        table[parts[-1]] = value


def apply_overrides(
    config: Mapping[str, object], overrides: Mapping[str, object]
) -> dict[str, object]:
    """Return a parsed TOML with the values of `overrides` in place of its own. Tables are merged,
    everything else is replaced."""
    merged = dict(config)
    for key, value in overrides.items():
        known = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = apply_overrides(known if isinstance(known, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged
