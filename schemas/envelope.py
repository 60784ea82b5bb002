"""Events on the wire: payloads are decoded by type and version, and CloudEvents 1.0 are written in
structured form.

On Kafka the same attributes travel in binary mode (headers `ce_*`). This module holds the JSON form
that the API, the command line and `docs/asyncapi.json` use.
"""

import json
from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from schemas.errors import HeadraceError
from schemas.events import EVENT_TYPES, Event
from schemas.events.upcasts import upcast

SOURCE = "headrace"


class UnknownEvent(HeadraceError):
    """A type that this version does not know. Readers skip it and count it."""


class BadEvent(HeadraceError):
    """A known type whose payload does not belong to any version that is known here."""


def decode_event(event_type: str, version: int, data: str | bytes) -> Event:
    """A payload of any released version becomes the current event.

    Raises UnknownEvent for an unknown type, and BadEvent for a payload that does not fit its type
    or has a version newer than this one.
    """
    kind = EVENT_TYPES.get(event_type)
    if kind is None:
        raise UnknownEvent(f"{event_type} is not an event of this version of Headrace")
    if version > kind.version:
        raise BadEvent(f"{event_type} has version {version}; this Headrace knows {kind.version}")
    try:
        if version == kind.version:
            return kind.model_validate_json(data)
        return kind.model_validate(
            upcast(event_type, version, json.loads(data), current=kind.version)
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadEvent(f"{event_type} version {version}: {error}") from error


class CloudEvent(BaseModel):
    """The structured JSON form of an event, with Headrace's extension attributes."""

    model_config = ConfigDict(frozen=True)
    specversion: str = "1.0"
    id: UUID
    source: str = SOURCE
    type: str
    subject: str
    time: datetime
    datacontenttype: str = "application/json"
    dataversion: int
    streamversion: int
    runid: str
    correlationid: UUID
    causationid: UUID | None = None
    traceparent: str | None = None
    actor: str | None = None
    cursor: str | None = None
    data: dict[str, object]
