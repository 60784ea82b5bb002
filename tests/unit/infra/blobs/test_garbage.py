"""Orphaned blobs are removed after a grace period, but never a blob that the log names, nor one
that an unfinished run may have written."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from infra.adapters import Backend, open_backend
from infra.blobs import garbage
from infra.blobs.artifacts import reference
from infra.blobs.garbage import GRACE, collect
from infra.blobs.installed import KEEPING
from infra.settings.settings import Settings
from infra.spine.postgres.errors import DatabaseUnavailable
from schemas.errors import TransientError
from schemas.events import PolicyUpdated
from tests.kit.specs import version

pytestmark = pytest.mark.postgres

LATER = GRACE + timedelta(minutes=5)


@pytest.fixture
async def backend(database_url: str, tmp_path: Path) -> AsyncIterator[Backend]:
    settings = Settings.load(
        {"HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_DATABASE_URL": database_url}
    )
    async with open_backend(settings) as opened:
        yield opened


async def orphan(backend: Backend, run: str) -> str:
    return await backend.blobs.put_blob(f"runs/{run}/objects/{'0' * 64}", b"nobody tells of it")


async def close(backend: Backend, run: str) -> None:
    await backend.database.durable.execute("insert into run_gates values ($1, 'closed')", run)


async def collected(backend: Backend, after: timedelta = LATER) -> int:
    return await collect(backend.database, backend.blobs, now=datetime.now(UTC) + after)


async def left(backend: Backend) -> list[str]:
    return [blob.uri for blob in await backend.blobs.keys("runs/")]


async def test_a_long_transaction_over_artifacts_does_not_end_the_collector(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of another kind would end the control process, which collects."""
    monkeypatch.setattr(garbage, "TABLE_S", 0.1)
    pool = backend.database.durable
    await pool.execute("insert into discards (sha256) values ($1)", "0" * 64)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("lock table artifacts in row exclusive mode")
        with pytest.raises(TransientError, match="stores artifacts"):
            await collected(backend)
    assert await collected(backend) == 0
    assert await pool.fetchval("select count(*) from discards") == 0


async def test_an_orphan_of_an_ended_run_goes_after_its_grace(backend: Backend) -> None:
    await orphan(backend, "r")
    await close(backend, "r")
    assert await collected(backend, GRACE / 2) == 0
    assert len(await left(backend)) == 1
    assert await collected(backend) == 1
    assert await left(backend) == []


async def test_a_named_blob_stays_even_under_a_former_place(backend: Backend) -> None:
    data = b"weights"
    uri = await backend.blobs.put_blob("runs/r/objects/a", data)
    former = "file:///where/it/was"
    await backend.database.durable.execute("insert into blob_places (root) values ($1)", former)
    other = await backend.blobs.put_blob("runs/r/objects/b", data)
    for n, place in enumerate((uri, f"{former}/runs/r/objects/b")):
        state = version(1).model_copy(update={"weights": reference(data, uri=place), "state": None})
        event = PolicyUpdated(
            run=f"r{n}", step=1, state=state, batch=uuid4(), metrics={}, plan=(1,), versions={}
        )
        await backend.log.append([event], cause=uuid4())
    await close(backend, "r")
    assert await collected(backend) == 0
    assert await left(backend) == [uri, other]


async def test_a_run_that_goes_on_keeps_everything(backend: Backend) -> None:
    """A worker of the run may be about to commit the event that names the blob."""
    await orphan(backend, "open")
    await orphan(backend, "at-work")
    await close(backend, "at-work")
    await backend.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
        " values ($1, 'c', 's', 'train', 'at-work', 't', '{}', $1)",
        uuid4(),
    )
    assert await collected(backend) == 0
    assert len(await left(backend)) == 2


async def name(backend: Backend, run: str, uri: str) -> None:
    """Append an event that names a blob of any run."""
    state = version(1).model_copy(update={"weights": reference(b"x", uri=uri), "state": None})
    event = PolicyUpdated(
        run=run, step=1, state=state, batch=uuid4(), metrics={}, plan=(1,), versions={}
    )
    await backend.log.append([event], cause=uuid4())


async def test_a_collector_that_lost_its_lock_deletes_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may restore an archive then, whose blobs no event names yet."""
    await orphan(backend, "r")
    await close(backend, "r")
    listed = garbage._pages_of_old_blobs

    async def lose_lock(*args: Any, **options: Any) -> AsyncIterator[dict[str, str]]:
        async for page in listed(*args, **options):
            admin = await asyncpg.connect(backend.database.url)
            await admin.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'headrace lock' and datname = current_database()"
            )
            await admin.close()
            yield page

    monkeypatch.setattr(garbage, "_pages_of_old_blobs", lose_lock)
    with pytest.raises(DatabaseUnavailable):
        await collected(backend)
    assert len(await left(backend)) == 1
    monkeypatch.undo()
    assert await collected(backend) == 1


async def test_many_runs_are_examined_page_by_page(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the memory does not grow with the number of blobs."""
    monkeypatch.setattr(garbage, "AT_ONCE", 3)
    pages = []
    delete = garbage._delete_unnamed

    async def counting(database: Any, blobs: Any, old: dict[str, str], *rest: Any) -> int:
        pages.append(len(old))
        return await delete(database, blobs, old, *rest)

    monkeypatch.setattr(garbage, "_delete_unnamed", counting)
    kept = []
    for number in range(7):
        run = f"r{number}"
        for which in "abc"[: 1 + number % 2]:
            await backend.blobs.put_blob(f"runs/{run}/objects/{which}", b"nobody tells of it")
        kept.append(await backend.blobs.put_blob(f"runs/{run}/objects/x", b"x"))
        await name(backend, f"r{(number + 3) % 7}", kept[-1])
        if number != 4:
            await close(backend, run)
    removed = "insert into removals (owner, at) values ('gone', now() - interval '2 hours')"
    await backend.database.durable.execute(removed)
    await orphan(backend, "gone")
    assert await collected(backend) == 10
    assert sum(pages) == 6 + 10
    assert max(pages) == 3
    assert len(pages) > 3
    assert await left(backend) == sorted(
        [*kept, await backend.blobs.exists("runs/r4/objects/a") or "none"]
    )


async def test_nothing_goes_while_a_backup_is_taken(backend: Backend) -> None:
    await orphan(backend, "r")
    await close(backend, "r")
    copying = await asyncpg.connect(backend.database.url)
    await copying.execute("select pg_advisory_lock($1)", KEEPING)
    await collected(backend)
    assert len(await left(backend)) == 1
    await copying.close()
    assert await collected(backend) == 1
