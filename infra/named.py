"""What the log names: every artifact that some event refers to, and whether its bytes must be there.

Read by whoever copies, checks or collects blobs. Rows are artifacts too, but they are part of the
database and need no looking after.
"""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from infra.artifacts import ROW
from schemas.envelope import decode_event
from schemas.errors import HeadraceError
from schemas.references import collectable, references
from schemas.sampling import ArtifactRef

PAGE = 1000

EVENTS = """
select stream, version, type, schema_version, data from events
where data::text like '%"uri"%' order by xid, position
"""


@dataclass(frozen=True, slots=True)
class Named:
    """An artifact outside of the database that an event names. `needed`: its bytes must be there, while
    those of versions kept for recovery alone may have been collected. `by` is `stream/version`."""

    ref: ArtifactRef
    needed: bool
    by: str


async def named(connection: Any) -> AsyncIterator[Named]:
    """Everything that the events of this transaction's snapshot name, in the log's order; an artifact
    comes as often as it is named."""
    async for row in connection.cursor(EVENTS, prefetch=PAGE):
        by = f"{row['stream']}/{row['version']}"
        for ref, needed in _of(row["type"], row["schema_version"], row["data"]):
            if not ref.uri.startswith(ROW):
                yield Named(ref, needed, by)


def _of(event_type: str, version: int, data: str) -> Iterator[tuple[ArtifactRef, bool]]:
    try:
        event = decode_event(event_type, version, data)
    except HeadraceError:
        # Of a newer version, or unreadable: whatever looks like a reference is one.
        yield from ((ref, True) for ref in _looking_like(json.loads(data)))
        return
    spare = collectable(event)
    yield from ((ref, ref.uri not in spare) for ref in references(event))


def _looking_like(value: object) -> Iterator[ArtifactRef]:
    if isinstance(value, dict):
        if {"uri", "sha256", "size"} <= value.keys():
            yield ArtifactRef.model_validate(value)
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _looking_like(item)
