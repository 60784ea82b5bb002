"""Connections that an installation had before migration 0053 are found after it."""

from collections.abc import Iterator

import pytest

from infra.spine.postgres.migrate import TABLE, apply, migrate, migrations
from infra.spine.postgres.pool import administering
from tests.kit.postgres import bare_database

pytestmark = pytest.mark.postgres

RENAMED = "0053_forges"


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


async def test_connections_keep_their_forge(bare_url: str) -> None:
    async with administering(bare_url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in migrations():
            if migration.name < RENAMED:
                await apply(connection, migration)
        await connection.execute(
            "insert into connections (workspace, provider, url) values ('w', 'gitea', '/srv/r')"
        )
    assert RENAMED in await migrate(bare_url)
    async with administering(bare_url) as connection:
        assert await connection.fetchval("select forge from connections") == "gitea"
