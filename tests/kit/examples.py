"""One example payload of every event, made from its JSON Schema: the source of tests/golden.

`python -m tests.kit.examples` writes the payloads that are missing in tests/golden. Existing payloads
were released, so they never change.
"""

import json
from pathlib import Path
from typing import Any

from schemas.events import ALL_EVENTS, Event

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

BY_NAME = {
    "group": "r1-train-3-0-0",
    "owner": "r1",
    "run": "r1",
    "sha256": "ab" * 32,
    "weights_sha256": "cd" * 32,
    "state_sha256": "ef" * 32,
    "manifest_sha256": "12" * 32,
    "archive_sha256": "34" * 32,
    "commit_sha": "0123abc",
    "requester": "run-r1",
    "repository": "org/name",
    "num_rows": 8,
    "num_samples": 4,
    "total_steps": 9,
    "deterministic": True,
    "date": "2026-11-22",
    "started_at": "2026-01-02T03:04:05Z",
    "completed_at": "2026-01-02T03:04:06Z",
    "ended_at": "2026-01-02T03:04:06Z",
    "last_at": "2026-01-02T03:04:06Z",
}
"""Values for fields whose format the schema does not fully describe."""

SKIPPED = {("Experiment", "branch")}
"""Fields that are left out, because they may not be set together with another field."""


def golden_name(event: type[Event]) -> str:
    return f"{event.type}.v{event.version}.json"


def example(event: type[Event]) -> dict[str, Any]:
    """A complete payload of this event."""
    schema = event.model_json_schema(mode="serialization")
    made = _value(schema, schema.get("$defs", {}), "")
    assert isinstance(made, dict)
    return json.loads(event.model_validate_json(json.dumps(made)).model_dump_json())


def _value(schema: dict[str, Any], defs: dict[str, Any], name: str) -> Any:
    if "$ref" in schema:
        return _value(defs[schema["$ref"].rsplit("/", 1)[1]], defs, "")
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], defs, name)
    if "allOf" in schema:
        return _value(schema["allOf"][0], defs, name)
    if name in BY_NAME:
        return BY_NAME[name]
    return _plain(schema, defs, name)


def _plain(schema: dict[str, Any], defs: dict[str, Any], name: str) -> Any:
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = schema["properties"].items()
            title = schema.get("title", "")
            return {k: _value(v, defs, k) for k, v in fields if (title, k) not in SKIPPED}
        case "object":
            inner = schema.get("additionalProperties")
            key = {"env": "KEY", "by_step": "1"}.get(name, "key")
            return {key: _value(inner, defs, "") if isinstance(inner, dict) else "value"}
        case "array" if "prefixItems" in schema:
            return [_value(item, defs, "") for item in schema["prefixItems"]]
        case "array":
            return [_value(schema.get("items", {}), defs, name)]
        case "integer":
            return int(schema.get("minimum", 1)) or 1
        case "number":
            return float(schema.get("minimum", schema.get("exclusiveMinimum", 0.0) + 0.5))
        case "boolean":
            return False
        case "string":
            return _text(schema)
        case _:
            return None


def _text(schema: dict[str, Any]) -> str:
    if schema.get("format") == "uuid":
        return "6f1c0c9e-6a0b-5a43-9d5c-0b8f6d0f7a11"
    pattern = schema.get("pattern", "")
    if "64" in pattern:
        return "34" * 32
    if "A-Z" in pattern:
        return "KEY"
    if "7,40" in pattern:
        return "0123abc"
    return "text"


def main() -> None:
    for event in ALL_EVENTS:
        path = GOLDEN / golden_name(event)
        if not path.exists():
            path.write_text(json.dumps(example(event), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
