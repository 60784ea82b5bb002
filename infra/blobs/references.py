"""Finds every artifact that an event of the log names, and whether its bytes must exist.

Backups, integrity checks, archives and the garbage collector use it.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infra.spine.ports.artifacts import ROW
from schemas.artifact_refs import ArtifactRef
from schemas.envelope import decode_event
from schemas.errors import HeadraceError
from schemas.events import Event
from schemas.events.artifact_refs import collectable, references

PAGE = 1000

EVENTS = """
select stream, version, type, schema_version, data from events
where data::text like '%"uri"%' order by xid, position
"""


NAMED = "select uri from named_uris($1) as n (uri)"


@dataclass(frozen=True, slots=True)
class NamedArtifact:
    """An artifact that an event names. `needed` says whether its bytes must exist: versions that are
    kept only for recovery may have been collected. `by` is the event, as `stream/version`."""

    ref: ArtifactRef
    needed: bool
    by: str


async def named_artifacts(connection: Any, *, rows: bool = False) -> AsyncIterator[NamedArtifact]:
    """Yield every artifact that the events of this transaction's snapshot name, in the order of the log.
    An artifact comes as often as it is named. `rows` includes those that are rows of the database."""
    async for row in connection.cursor(EVENTS, prefetch=PAGE):
        by = f"{row['stream']}/{row['version']}"
        for found in named_in(row, by):
            if rows or not found.ref.uri.startswith(ROW):
                yield found


async def named_uris(connection: Any, uris: Sequence[str]) -> set[str]:
    """Return those of the URIs that an event of this transaction's snapshot names. They are found in an
    index, however long the log is."""
    return {row["uri"] for row in await connection.fetch(NAMED, uris)}


def named_by(event: Event, by: str) -> Iterator[NamedArtifact]:
    """The references of one event, including rows."""
    spare = collectable(event)
    for ref in references(event):
        yield NamedArtifact(ref, needed=ref.uri not in spare, by=by)


def named_in(row: Any, by: str) -> Iterator[NamedArtifact]:
    """The references of the event in a row of the log, including rows, even if it cannot be decoded."""
    try:
        event = decode_event(row["type"], row["schema_version"], row["data"])
    except HeadraceError:
        # The event has a newer version or is unreadable. Everything that looks like a reference
        # counts as one.
        yield from (
            NamedArtifact(ref, needed=True, by=by) for ref in _looking_like(json.loads(row["data"]))
        )
        return
    yield from named_by(event, by)


def _looking_like(value: object) -> Iterator[ArtifactRef]:
    if isinstance(value, dict):
        if {"uri", "sha256", "size"} <= value.keys():
            yield ArtifactRef.model_validate(value)
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _looking_like(item)
