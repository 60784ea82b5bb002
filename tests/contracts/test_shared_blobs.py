"""Content that several runs begin with is stored once, in a directory and in an S3 store, and is not
deleted while an event names it or a run is about to."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.blobs import installed
from infra.blobs.artifacts import SHARED, ArtifactStore
from infra.blobs.garbage import GRACE, collect
from infra.blobs.installed import InstalledBlobs, install
from infra.blobs.local import LocalBlobs
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.artifact_refs import ArtifactRef
from schemas.events import PolicyUpdated
from tests.kit.specs import version

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

WEIGHTS = b"weights" * 20_000


@pytest.fixture(params=["directory", "s3"])
async def blobs(
    request: pytest.FixtureRequest, database: Database, tmp_path: Path
) -> InstalledBlobs:
    if request.param == "directory":
        return await install(LocalBlobs(tmp_path / "blobs"), database)
    return await install(request.getfixturevalue("bucket").blobs("p"), database)


@pytest.fixture
async def log(database: Database) -> AsyncIterator[PostgresLog]:
    async with Notifier(database) as notifier:
        yield PostgresLog(database, notifier)


@pytest.fixture
def artifacts(blobs: InstalledBlobs, log: PostgresLog) -> ArtifactStore:
    return ArtifactStore(log, blobs)


async def put(artifacts: ArtifactStore, run: str) -> ArtifactRef:
    return await artifacts.put_artifact(WEIGHTS, run=run, blob=True, shared=True)


async def name(log: PostgresLog, run: str, weights: ArtifactRef) -> None:
    state = version(1).model_copy(update={"weights": weights, "state": None})
    event = PolicyUpdated(
        run=run, step=1, state=state, batch=uuid4(), metrics={}, plan=(1,), versions={}
    )
    await log.append([event], cause=uuid4())


async def collected(database: Database, blobs: InstalledBlobs, after: timedelta) -> int:
    return await collect(database, blobs, now=datetime.now(UTC) + after)


async def test_runs_that_begin_alike_store_their_weights_once(
    artifacts: ArtifactStore, blobs: InstalledBlobs
) -> None:
    refs = await asyncio.gather(*(put(artifacts, f"r{n}") for n in range(3)))
    assert len({ref.uri for ref in refs}) == 1
    [blob] = await blobs.keys("")
    assert (blob.key, blob.size) == (f"{SHARED}{refs[0].sha256}", len(WEIGHTS))
    await artifacts.discard(refs[0])
    assert await artifacts.get_artifact(refs[1], cached=False) == WEIGHTS


async def test_named_blobs_stay_and_old_unnamed_ones_are_deleted(
    artifacts: ArtifactStore, blobs: InstalledBlobs, log: PostgresLog, database: Database
) -> None:
    named = await put(artifacts, "r")
    await artifacts.put_artifact(b"other" * 20_000, run="r", blob=True, shared=True)
    await name(log, "r", named)
    assert await collected(database, blobs, GRACE / 2) == 0
    assert await collected(database, blobs, GRACE + timedelta(minutes=1)) == 1
    assert [blob.uri for blob in await blobs.keys("")] == [named.uri]


@pytest.mark.parametrize("looks_again", [True, False])
async def test_a_blob_that_a_run_stores_again_during_a_collection_stays(
    artifacts: ArtifactStore,
    blobs: InstalledBlobs,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    looks_again: bool,
) -> None:
    """The run comes after the look-up of names, and before the deletion. The twin: a collector that does
    not look at the time again deletes what the run is about to name."""
    await put(artifacts, "r")
    delete, now = blobs.delete_shared, datetime.now(UTC)
    monkeypatch.setattr(installed, "FRESH", timedelta())

    async def come_before(key: str, *, before: datetime) -> bool:
        await asyncio.sleep(1.6)  # a store may tell times in whole seconds
        await put(artifacts, "other")
        late = datetime.now(UTC) + timedelta(days=1)
        return await delete(key, before=before if looks_again else late)

    monkeypatch.setattr(blobs, "delete_shared", come_before)
    await collect(database, blobs, now=now + timedelta(seconds=0.5), grace=timedelta())
    assert len(await blobs.keys("")) == int(looks_again)


async def test_content_that_is_old_is_written_again(
    artifacts: ArtifactStore, blobs: InstalledBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    inner: Any = blobs._inner
    write = inner.put_blob

    async def count(key: str, data: bytes, **options: Any) -> str:
        written.append(key)
        return str(await write(key, data, **options))

    monkeypatch.setattr(inner, "put_blob", count)
    for _ in range(3):
        await put(artifacts, "r")
    assert len(written) == 1
    monkeypatch.setattr(installed, "FRESH", timedelta())
    await put(artifacts, "r")
    assert len(written) == 2


@pytest.mark.parametrize("is_fresh", [True, False])
async def test_only_content_that_is_not_fresh_waits_for_others_that_store_it(
    artifacts: ArtifactStore,
    blobs: InstalledBlobs,
    monkeypatch: pytest.MonkeyPatch,
    is_fresh: bool,
) -> None:
    """Each lock is a database connection of its own, so a run that begins like others takes none."""
    first = await put(artifacts, "r")
    if not is_fresh:
        monkeypatch.setattr(installed, "FRESH", timedelta())
    async with blobs._alone(f"{SHARED}{first.sha256}"):
        storing = asyncio.ensure_future(put(artifacts, "other"))
        done, _ = await asyncio.wait({storing}, timeout=5 if is_fresh else 1)
        assert bool(done) is is_fresh
    assert (await storing).uri == first.uri
