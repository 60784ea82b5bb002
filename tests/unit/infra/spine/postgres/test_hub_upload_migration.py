"""Uploads to a model hub that an installation had before migration 0055 are found after it, and those
that wait are performed."""

import json
from collections.abc import Iterator
from uuid import uuid4

import pytest

from infra.spine.postgres.migrate import TABLE, apply, migrate, migrations
from infra.spine.postgres.pool import administering
from schemas.effects import UploadCheckpoint
from schemas.envelope import decode_effect
from tests.kit.old_events import old_push
from tests.kit.postgres import bare_database
from tests.unit.consumers.deploy.test_publish import UPLOAD

pytestmark = pytest.mark.postgres

RENAMED = "0055_hub_uploads"


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


async def test_uploads_are_found_and_performed_after_the_migration(bare_url: str) -> None:
    async with administering(bare_url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in migrations():
            if migration.name < RENAMED:
                await apply(connection, migration)
        await connection.execute(
            "insert into hub_pushes (push, run, step, repository, form, visibility, status, created_at)"
            " values ('p1', 'r1', 3, 'org/sums', 'adapter', 'private', 'pushed', now())"
        )
        await connection.execute(
            "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
            " values ($1, 'publish', 'hub-p1', 'export', 'p1', 'PushCheckpoint', $2, $1)",
            uuid4(),
            json.dumps({"push": old_push(UPLOAD)}),
        )
    assert RENAMED in await migrate(bare_url)
    async with administering(bare_url) as connection:
        [row] = await connection.fetch("select upload, status from hub_uploads")
        assert (row["upload"], row["status"]) == ("p1", "uploaded")
        [waiting] = await connection.fetch("select type, data::text as data from effects")
    found = decode_effect(waiting["type"], waiting["data"])
    assert found == UploadCheckpoint(upload=UPLOAD)
