"""Events on the wire: payloads are decoded by type and version, and CloudEvents 1.0 are written in
structured form. Effects are decoded by their type.

On Kafka the same attributes travel in binary mode (headers `ce_*`). This module holds the JSON form
that the API, the command line and the AsyncAPI document use.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from schemas.effects import ALL_EFFECTS
from schemas.effects.effect import Effect
from schemas.errors import HeadraceError
from schemas.events import EVENT_TYPES as EVENT_TYPES
from schemas.events.event import Event
from schemas.events.upcasts import upcast

SOURCE = "headrace"

EFFECT_TYPES: dict[str, type[Effect]] = {effect.type: effect for effect in ALL_EFFECTS}


class NewerEvent(HeadraceError):
    """An event whose type or version this release does not know, because a newer one wrote it. It is
    left for a process of that release."""


class BadEvent(HeadraceError):
    """A known type whose payload does not fit its version."""


def decode_event(event_type: str, version: int, data: str | bytes) -> Event:
    """A payload of any released version becomes the current event.

    Raises NewerEvent for a type or a version that a newer release wrote, and BadEvent for a payload that
    does not fit.
    """
    kind = EVENT_TYPES.get(event_type)
    if kind is None or not is_known(event_type, version):
        known = f"version {kind.version}" if kind else "no such event"
        raise NewerEvent(f"{event_type} version {version}: this release of Headrace knows {known}")
    try:
        if version == kind.version:
            return kind.model_validate_json(data)
        payload = upcast(kind.type, version, json.loads(data), current=kind.version)
        return kind.model_validate_json(json.dumps(payload))  # as strict as what was never upcast
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadEvent(f"{event_type} version {version}: {error}") from error


def is_known(event_type: str, version: int) -> bool:
    """Whether this release can read events of this type and version."""
    kind = EVENT_TYPES.get(event_type)
    return kind is not None and version <= kind.version


def current_type(event_type: str) -> str:
    """Return the type that events of this type have today."""
    kind = EVENT_TYPES.get(event_type)
    return event_type if kind is None else kind.type


def stored_types(types: Iterable[str]) -> list[str]:
    """Return these types, and those under which earlier releases stored the same events."""
    wanted = dict.fromkeys(map(current_type, types))
    old = (EVENT_TYPES[kind].old_type for kind in wanted if kind in EVENT_TYPES)
    return [*wanted, *(kind for kind in old if kind is not None)]


def decode_effect(effect_type: str, data: str | bytes) -> Effect:
    """Return the effect of a row. Raises KeyError for a type that this release does not have."""
    return EFFECT_TYPES[effect_type].model_validate_json(data)


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
