"""The event catalogue as documents: `python -m schemas.events.pages docs` writes events.md, and the API
answers GET /api/v1/asyncapi.json with the same for programs.

Both are derived from `schemas/events/` alone. tests/golden/test_documents.py fails when events.md is
out of date.
"""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from schemas.envelope import CloudEvent
from schemas.events import ALL_EVENTS, Event

Json = dict[str, object]


def events_markdown() -> str:
    """docs/events.md: every event, in the order in which they occur in a run."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Events"
    yield ""
    yield "This page is generated from `schemas/events/` by `python -m schemas.events.pages docs`."
    yield "It lists the events in the order in which they occur in a run. *Gate* says whether workers"
    yield "may claim the run's effects after the event. Most events do not change it."
    for event in ALL_EVENTS:
        gate = f" Gate: {event.gate}." if event.gate else ""
        yield ""
        yield f"## {event.__name__}"
        yield ""
        old = f" Earlier releases wrote `{event.old_type}`." if event.old_type else ""
        yield f"`{event.type}` version {event.version}, topic `{event.topic}`.{gate}{old}"
        yield ""
        text = " ".join((inspect.getdoc(event) or "").split())
        yield from textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
        yield ""
        yield "| field | type | |"
        yield "|---|---|---|"
        for name, field in event.model_fields.items():
            default = "" if field.is_required() else "optional"
            yield f"| `{name}` | `{_type_name(field.annotation)}` | {default} |"


def _type_name(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for noise in (
        "typing.",
        "schemas.specs.",
        "schemas.sampling.",
        "schemas.artifact_refs.",
        "schemas.config.",
        "schemas.ids.",
    ):
        text = text.replace(noise, "")
    return re.sub(r"schemas\.events\.\w+\.", "", text).replace("|", "or")


@cache
def asyncapi_json() -> bytes:
    """The AsyncAPI document as JSON. It has a megabyte, so it is built once."""
    return json.dumps(asyncapi()).encode()


def asyncapi() -> Json:
    """An AsyncAPI 3.0 document: a channel per topic, a message per event, CloudEvents around each."""
    channels: dict[str, Json] = {}
    messages: dict[str, Json] = {}
    schemas: dict[str, Json] = {"CloudEvent": _schema(CloudEvent)}
    for event in ALL_EVENTS:
        name = event.__name__
        schemas[name] = _schema(event)
        schemas[f"{name}CloudEvent"] = _envelope(event)
        messages[name] = {
            "name": event.type,
            "title": name,
            "summary": " ".join((inspect.getdoc(event) or "").split()),
            "contentType": "application/cloudevents+json",
            "payload": {"$ref": f"#/components/schemas/{name}CloudEvent"},
        }
        channel = channels.setdefault(event.topic, {"address": event.topic, "messages": {}})
        held = channel["messages"]
        assert isinstance(held, dict)  # noqa: S101 - made one line above
        held[name] = {"$ref": f"#/components/messages/{name}"}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Headrace events", "version": "1"},
        "defaultContentType": "application/cloudevents+json",
        "channels": channels,
        "components": {"messages": messages, "schemas": schemas},
    }


def _envelope(event: type[Event]) -> Json:
    """The CloudEvent that carries this event: its type and its data are fixed."""
    return {
        "allOf": [
            {"$ref": "#/components/schemas/CloudEvent"},
            {
                "type": "object",
                "properties": {
                    "type": {"enum": list(filter(None, (event.type, event.old_type)))},
                    "dataversion": {"const": event.version},
                    "data": {"$ref": f"#/components/schemas/{event.__name__}"},
                },
            },
        ]
    }


def _schema(model: type[Event] | type[CloudEvent]) -> Json:
    """The JSON Schema of a model, with its definitions inside itself."""
    schema = model.model_json_schema(mode="serialization")
    text = json.dumps(schema).replace("#/$defs/", f"#/components/schemas/{model.__name__}/$defs/")
    found: Json = json.loads(text)
    return found


def write(directory: Path) -> None:
    """Write events.md."""
    (directory / "events.md").write_text(events_markdown())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
