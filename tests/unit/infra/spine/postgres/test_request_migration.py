"""Commits that an installation was to fetch before migration 0056 are fetched after it."""

import json
from collections.abc import Iterator
from uuid import UUID

import pytest

from infra.spine.postgres.migrate import TABLE, apply, migrate, migrations
from infra.spine.postgres.pool import administering
from schemas.effects import FetchCommit
from schemas.envelope import decode_effect
from schemas.specs import CommitSpec
from tests.kit.postgres import bare_database

pytestmark = pytest.mark.postgres

RENAMED = "0056_effects_of_requests"
FETCH = FetchCommit(
    workspace="w1", request=UUID(int=7), commit=CommitSpec(url="/srv/sums.git"), entrypoints=()
)


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


async def test_a_commit_that_waits_is_fetched_after_the_migration(bare_url: str) -> None:
    fields = json.loads(FETCH.model_dump_json())
    old = {"push": fields.pop("request"), **fields}
    async with administering(bare_url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in migrations():
            if migration.name < RENAMED:
                await apply(connection, migration)
        await connection.execute(
            "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
            " values ($1, 'sync', 'workspace-w1', 'control', 'w1', $2, $3, $1)",
            *(FETCH.id, FETCH.type, json.dumps(old)),
        )
    assert RENAMED in await migrate(bare_url)
    async with administering(bare_url) as connection:
        [row] = await connection.fetch("select id, type, data::text as data from effects")
    found = decode_effect(row["type"], row["data"])
    assert (found, found.id) == (FETCH, row["id"])
