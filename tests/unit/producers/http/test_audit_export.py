"""The chains of the audit list in the database: exported, verified, trimmed, and written at once."""

import asyncio
import json
from pathlib import Path

import pytest

from infra.identity.audit import AuditList
from infra.identity.audit_chain import verify
from tests.kit.application import Application
from tests.kit.tenants import create_api_key

pytestmark = pytest.mark.postgres


async def fill(app: Application, count: int = 6) -> None:
    for number in range(count):
        await create_api_key(app, f"k{number}", "read")
        await app.api.get(f"/api/v1/runs/{number}")
        await app.services.audit.flush(everything=True)


async def broken(app: Application) -> dict[str, int]:
    chains = (await app.get("/audit/verification"))["chains"]
    return {name: one["broken_at"] for name, one in chains.items() if one["broken_at"] is not None}


async def test_an_export_is_verified_without_the_server(app: Application, tmp_path: Path) -> None:
    await fill(app)
    text = (await app.api.get("/api/v1/audit/export")).text
    entries = [json.loads(line) for line in text.splitlines()]
    reports = verify(entries)
    assert reports["changes"].entries == 6
    assert [one.broken_at for one in reports.values()] == [None, None]
    served = (await app.get("/audit/verification"))["chains"]
    assert served["changes"]["head"] == reports["changes"].head


@pytest.mark.parametrize(
    "tampering",
    [
        "update audit set owner = 'mallory' where id = $1",
        "delete from audit where id = $1",
        "update audit set sha256 = previous_sha256 where id = $1",
    ],
)
async def test_a_row_that_was_changed_or_deleted_in_the_database_is_found(
    app: Application, tampering: str
) -> None:
    await fill(app)
    assert await broken(app) == {}
    pool = app.database.durable
    ids = [
        row["id"]
        for row in await pool.fetch("select id from audit where method = 'POST' order by id")
    ]
    async with pool.acquire() as connection:
        await connection.execute(tampering, ids[2])
    assert list(await broken(app)) == ["changes"]


async def test_deleting_the_newest_rows_is_found(app: Application) -> None:
    await fill(app)
    newest = "delete from audit where id = (select max(id) from audit where method = 'POST')"
    await app.database.durable.execute(newest)
    assert list(await broken(app)) == ["changes"]


@pytest.mark.parametrize(
    "tampering",
    [
        "delete from audit",
        "update audit set owner = 'mallory', sha256 = null, previous_sha256 = null",
        "update audit set owner = 'mallory', sha256 = null, previous_sha256 = null"
        " where id in (select id from audit order by id limit 4)",
    ],
)
async def test_a_list_that_was_emptied_or_lost_its_hashes_is_found(
    app: Application, tampering: str
) -> None:
    await fill(app)
    await app.database.durable.execute(tampering)
    assert "changes" in await broken(app)


async def test_a_trim_leaves_chains_that_are_whole(app: Application) -> None:
    await fill(app, 10)
    await app.services.audit.trim(changes=3, others=2)
    chains = (await app.get("/audit/verification"))["chains"]
    assert chains["changes"]["entries"] == 3
    assert await broken(app) == {}
    await AuditList(app.database, app.services.clock, days=-1).trim()  # all are too old
    kept = await app.database.durable.fetchval("select count(*) from audit")
    assert kept == 2, "the newest of each chain"
    await create_api_key(app, "later", "read")
    assert await broken(app) == {}


async def test_processes_that_write_at_once_make_one_chain(app: Application) -> None:
    lists = [AuditList(app.database, app.services.clock, days=9), app.services.audit]
    await create_api_key(app, "one", "read")
    [entry] = app.services.audit._buffer.take(app.services.clock.now())[:1]
    for _ in range(5):
        for each in lists:
            each.add(entry)
        await asyncio.gather(*(each.flush(everything=True) for each in lists))
    assert (
        await app.database.durable.fetchval("select count(*) from audit where sha256 is not null")
        >= 10
    )
    assert await broken(app) == {}
