"""API keys, sessions and use that an installation had before migration 0052 are found after it."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from infra.identity.api_key_format import issue_api_key
from infra.identity.api_keys import ApiKeys
from infra.identity.sessions import Sessions
from infra.spine.postgres.migrate import TABLE, apply, migrate, migrations
from infra.spine.postgres.pool import administering, connect
from tests.kit.postgres import bare_database

pytestmark = pytest.mark.postgres

RENAMED = "0052_api_keys"


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


async def test_keys_sessions_and_use_are_found_after_the_migration(bare_url: str) -> None:
    issued, later = issue_api_key(), datetime.now(UTC) + timedelta(hours=1)
    async with administering(bare_url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in migrations():
            if migration.name < RENAMED:
                await apply(connection, migration)
        await connection.execute(
            "insert into api_tokens (id, name, owner, prefix, sha256, scopes, created_by)"
            " values ($1, 'ci', 'ada', $2, $3, '{read}', 'root')",
            *(issued.id, issued.prefix, issued.sha256),
        )
        await connection.execute(
            "insert into browser_sessions (sha256, token, token_sha256, expires_at)"
            " values ($1, $2, $3, $4)",
            *(hashlib.sha256(b"cookie").digest(), issued.id, issued.sha256, later),
        )
        await connection.execute(
            "insert into inference_usage (token, model, requests) values ($1, 'm', 7)",
            issued.id,
        )
    assert RENAMED in await migrate(bare_url)
    async with connect(bare_url, size=1) as database:
        found = await ApiKeys(database).find("ci", workspace=None)
        assert found.with_secret(issued.sha256) == found
        bearer = await Sessions(database).find_bearer("cookie")
        assert bearer is not None
        assert (bearer.api_key, bearer.sha256) == (issued.id, issued.sha256)
        query = "select requests from inference_usage where api_key = $1"
        assert await database.durable.fetchval(query, issued.id) == 7
