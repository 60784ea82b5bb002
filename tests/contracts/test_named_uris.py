"""Whether an event names a blob is found by an index: with every kind of event, with as much reading in
a long log as in a short one, and at once when the event is committed."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from infra.blobs.references import NAMED, named_by, named_uris
from infra.spine.postgres.pool import Database
from schemas.envelope import decode_event
from tests.kit.examples import GOLDEN
from tests.kit.postgres import execute

pytestmark = pytest.mark.postgres

ASKED = 1000
BUFFERS = 16
"""The most buffers that may be read for one URI: the index's levels, and the page of one event."""

FILL = """
insert into events (id, stream, version, type, schema_version, data, run_id, correlation)
select md5(n::text)::uuid, 's' || n, 1, 'rl.group.graded', 1,
       format('{{"artifact":{{"uri":"file:///b/%s"}},"shared":{{"uri":"file:///weights"}}}}', n)::json,
       'r', md5('c')::uuid
from generate_series({first}, {last}) n;
"""

INSERT = """
insert into events (id, stream, version, type, schema_version, data, run_id, correlation)
select md5($1)::uuid, $1, 1, $2, 1, $3::json, 'r', md5('c')::uuid
"""


async def buffers(database: Database, uris: list[str]) -> int:
    """The buffers that are read to look these URIs up."""
    told = await database.durable.fetchval(f"explain (analyze, buffers, format json) {NAMED}", uris)
    plan = json.loads(told)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def asked() -> list[str]:
    """Half of them are named by an event, and one by every event."""
    return ["file:///weights", *(f"file:///b/{n}" for n in range(1, ASKED // 2))] + [
        f"file:///none/{n}" for n in range(ASKED // 2)
    ]


async def test_a_look_up_reads_as_much_in_a_long_log_as_in_a_short_one(database: Database) -> None:
    read = []
    for first, last in ((1, 2_000), (2_001, 20_000)):
        await execute(database.url, FILL.format(first=first, last=last))
        async with database.durable.acquire() as connection:
            assert await named_uris(connection, asked()) == set(asked()[: ASKED // 2])
        read.append(await buffers(database, asked()))
    assert max(read) < BUFFERS * ASKED
    # The blob that every event names has a list as long as the log, which is read once.
    assert read[1] < read[0] + 2 * ASKED


async def test_twin_without_the_index_the_log_is_read_for_each_uri(database: Database) -> None:
    await execute(database.url, FILL.format(first=1, last=2_000))
    await execute(database.url, "drop index events_names")
    few = asked()[-20:]
    assert await buffers(database, few) > BUFFERS * len(few)


def with_own_uris(value: Any, numbers: Iterator[int]) -> Any:
    """A payload in which each reference has a URI of its own."""
    if isinstance(value, dict):
        found = {key: with_own_uris(one, numbers) for key, one in value.items()}
        return {**found, "uri": f"file:///%C3%A4/{next(numbers)}"} if "uri" in value else found
    return [with_own_uris(one, numbers) for one in value] if isinstance(value, list) else value


async def test_uris_in_every_type_of_event_are_found(database: Database) -> None:
    numbers = itertools.count()
    wanted: set[str] = set()
    for path in sorted(GOLDEN.glob("*.json")):
        kind, _, version = path.stem.rpartition(".v")
        payload = json.dumps(with_own_uris(json.loads(path.read_text()), numbers))
        event = decode_event(kind, int(version), payload)
        wanted |= {named.ref.uri for named in named_by(event, path.stem)}
        await database.durable.execute(INSERT, path.stem, kind, event.model_dump_json())
    assert len(wanted) > 20
    async with database.durable.acquire() as connection:
        assert await named_uris(connection, [*wanted, "file:///other"]) == wanted


async def test_an_event_is_found_once_it_is_committed(database: Database) -> None:
    data = json.dumps({"artifact": {"uri": "file:///new", "sha256": "1", "size": 1}})
    async with (
        database.durable.acquire() as writing,
        database.durable.acquire() as reading,
        writing.transaction(),
    ):
        await writing.execute(INSERT, "s", "rl.group.graded", data)
        assert await named_uris(writing, ["file:///new"]) == {"file:///new"}
        assert await named_uris(reading, ["file:///new"]) == set()
    async with database.durable.acquire() as reading:
        assert await named_uris(reading, ["file:///new"]) == {"file:///new"}
