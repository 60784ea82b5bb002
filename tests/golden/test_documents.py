"""The generated pages are fresh: docs/events.md follows the catalogue of events, docs/config.md follows
the keys of a TOML, and events conform to the AsyncAPI document."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args
from uuid import UUID

import jsonschema
import pytest
from pydantic import BaseModel

from schemas.config import Advanced
from schemas.envelope import CloudEvent
from schemas.events import ALL_EVENTS, Event
from schemas.events.pages import asyncapi_json, events_markdown
from schemas.toml.page import TABLES, config_markdown
from tests.kit.examples import example

DOCS = Path(__file__).resolve().parents[2] / "docs"
STALE = "stale: run `python -m schemas.events.pages docs`"


def test_the_documents_are_fresh() -> None:
    assert (DOCS / "events.md").read_text() == events_markdown(), STALE


def test_the_page_of_keys_is_fresh_and_every_key_has_a_meaning() -> None:
    page = (DOCS / "config.md").read_text()
    assert page == config_markdown(), "stale: run `python -m schemas.toml.page docs/config.md`"
    assert "|  |\n" not in page


def test_the_page_of_keys_has_each_table_of_a_run() -> None:
    tables = (
        inner
        for field in Advanced.model_fields.values()
        for inner in (field.annotation, *get_args(field.annotation))
        if isinstance(inner, type) and issubclass(inner, BaseModel)
    )
    assert set(tables) == set(TABLES.values())


@pytest.mark.parametrize("kind", ALL_EVENTS, ids=lambda kind: kind.__name__)
def test_events_say_what_they_mean_and_validate(kind: type[Event]) -> None:
    assert kind.__doc__
    assert kind.__doc__ != Event.__doc__
    document = json.loads(asyncapi_json())
    cloud = CloudEvent(
        id=UUID(int=1),
        type=kind.type,
        subject="s",
        time=datetime(2026, 1, 1, tzinfo=UTC),
        dataversion=kind.version,
        streamversion=1,
        runid="r",
        correlationid=UUID(int=2),
        data=example(kind),
    ).model_dump(mode="json")
    schema = {**document, "$ref": f"#/components/schemas/{kind.__name__}CloudEvent"}
    jsonschema.validate(cloud, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cloud, "type": "something.else"}, schema)
