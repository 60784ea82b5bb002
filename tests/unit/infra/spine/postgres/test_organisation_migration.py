"""Names, API keys and workspaces that an installation had before migration 0059 are those of the
organisation `main` after it."""

import json
from collections.abc import Iterator

import pytest

from infra.identity.api_key_format import issue_api_key
from infra.identity.api_keys import ApiKeys
from infra.identity.organisations import Organisations
from infra.names import PostgresNames, TakenName
from infra.ports.actor import MAIN
from infra.spine.postgres.migrate import TABLE, apply, migrate, migrations
from infra.spine.postgres.pool import Pool, administering, connect
from tests.kit.postgres import bare_database
from tests.kit.quotas import quotas

pytestmark = pytest.mark.postgres

ORGANISATIONS = "0059_organisations"
INSERT_EVENT = (
    "insert into events (id, stream, version, type, schema_version, run_id, data, correlation)"
    " values (gen_random_uuid(), $1, 1, $2, 1, $3, $4::json, gen_random_uuid())"
)
NAMES = (
    ("workspace", "sums", "w1"),
    ("run", "of-a-rollout", "r1"),
    ("run", "of-a-key", "r2"),
    ("run", "of-none", "r3"),
    ("evaluation", "measure", "e1"),
    ("dataset", "own", "d1"),
    ("dataset", "common", "d2"),
    ("request", "once", "digest"),
)
EVENTS = (
    ("run-r1", "rl.run.requested", "r1", {"workspace": "w1"}),
    ("run-r2", "rl.run.requested", "r2", {"workspace": None, "belongs_to": "w1"}),
    ("run-r3", "rl.run.requested", "r3", {"workspace": None, "belongs_to": None}),
    ("eval-e1", "rl.evaluation.requested", "e1", {"workspace": "w1"}),
    ("dataset-d1", "rl.dataset.registered", "d1", {"workspace": "w1"}),
    ("dataset-d2", "rl.dataset.registered", "d2", {"workspace": None}),
)
SCOPES = {"r1": "w1", "r2": "w1", "r3": "", "e1": "w1", "d1": "w1", "d2": MAIN, "w1": MAIN}


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


async def test_an_installation_from_before_belongs_to_main(bare_url: str) -> None:
    bound, free = issue_api_key(), issue_api_key()
    async with administering(bare_url) as connection, connection.transaction():
        await connection.execute(TABLE)
        for migration in migrations():
            if migration.name < ORGANISATIONS:
                await apply(connection, migration)
        insert = "insert into names (kind, name, id) values ($1, $2, $3)"
        await connection.executemany(insert, NAMES)
        for stream, kind, run, data in EVENTS:
            await connection.execute(
                INSERT_EVENT, stream, kind, run, json.dumps({**data, "run": run})
            )
        for issued, name, workspace in ((bound, "ci", "w1"), (free, "ops", None)):
            await connection.execute(
                "insert into api_keys (id, name, owner, prefix, sha256, scopes, workspace, created_by)"
                " values ($1, $2, 'ada', $3, $4, '{read}', $5, 'root')",
                *(issued.id, name, issued.prefix, issued.sha256, workspace),
            )
    assert ORGANISATIONS in await migrate(bare_url)
    async with connect(bare_url, size=1) as database:
        names, organisations = PostgresNames(database), Organisations(database, quotas(database))
        for kind, name, identity in NAMES:
            scope = SCOPES.get(identity, "")
            found = await names.find_holders(kind, name)  # type: ignore[arg-type]  # a str
            assert found == [TakenName(name, scope, identity)]
        assert await organisations.workspaces_of(MAIN) == {"w1"}
        assert await organisations.home_of("w1") == MAIN
        assert (await organisations.find(MAIN)).name == MAIN
        keys = ApiKeys(database)
        assert (await keys.find("ci", workspace=None)).organisation == MAIN
        assert (await keys.find("ops", workspace=None)).organisation is None
        await _check_indexes(database.durable)


async def _check_indexes(pool: Pool) -> None:
    """The same name is free in another workspace, and not in the same one."""
    insert = "insert into names (kind, name, id, scope) values ('run', 'of-a-rollout', 'r9', $1)"
    await pool.execute(insert, "w2")
    taken = await pool.execute(f"{insert} on conflict do nothing", "w1")
    assert taken == "INSERT 0 0"
