"""The blobs of an installation keep the contract. They are found again after a move, and none is
deleted while somebody copies them."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from infra.adapters import open_backend
from infra.blobs.installed import KEEPING, InstalledBlobs, install
from infra.blobs.local import LocalBlobs
from infra.settings.settings import Settings
from infra.spine.postgres.pool import Database, connect
from schemas.errors import NotFound
from tests.contracts.blobs_suite import BlobsSuite

pytestmark = pytest.mark.postgres


class TestInstalledBlobs(BlobsSuite):
    @pytest.fixture
    async def blobs(self, tmp_path: Path, database_url: str) -> AsyncIterator[InstalledBlobs]:
        async with connect(database_url, size=1) as database:
            yield await install(LocalBlobs(tmp_path / "blobs"), database)


def settings(url: str, blobs: Path) -> Settings:
    home = str(blobs.parent / "home")
    named = {"HEADRACE_HOME": home, "HEADRACE_DATABASE_URL": url, "HEADRACE_BLOBS": blobs.as_uri()}
    return Settings.load(named)


async def test_blobs_that_were_moved_are_found_by_their_former_uris(
    database_url: str, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    async with open_backend(settings(database_url, first)) as backend:
        one = await backend.blobs.put_blob("runs/r/objects/a", b"one")
    shutil.move(first, second)
    async with open_backend(settings(database_url, second)) as backend:
        assert await backend.blobs.get_blob(one) == b"one"
        two = await backend.blobs.put_blob("runs/r/objects/b", b"two")
        assert [piece async for piece in backend.blobs.chunks(one)] == [b"one"]
    shutil.move(second, third)
    async with open_backend(settings(database_url, third)) as backend:
        assert [await backend.blobs.get_blob(uri) for uri in (one, two)] == [b"one", b"two"]
        assert await backend.blobs.file(one) == third / "runs/r/objects/a"
        await backend.blobs.delete(one)
        with pytest.raises(NotFound):
            await backend.blobs.get_blob(one)
        with pytest.raises(NotFound):
            await backend.blobs.get_blob("file:///elsewhere/runs/r/objects/a")


async def test_a_place_that_another_process_named_later_is_learnt(
    database: Database, tmp_path: Path
) -> None:
    blobs = await install(LocalBlobs(tmp_path / "blobs"), database)
    (tmp_path / "mount").symlink_to(tmp_path / "blobs")
    other = await install(LocalBlobs(tmp_path / "mount"), database)
    uri = await other.put_blob("runs/r/x", b"x")
    assert "/mount/" in uri
    assert await blobs.get_blob(uri) == b"x"


async def test_nothing_is_deleted_while_somebody_copies(database: Database, tmp_path: Path) -> None:
    blobs = await install(LocalBlobs(tmp_path / "blobs"), database)
    uri = await blobs.put_blob("runs/r/x", b"x")
    copying = await asyncpg.connect(database.url)
    await copying.execute("select pg_advisory_lock($1)", KEEPING)
    await blobs.delete(uri)
    assert await blobs.get_blob(uri) == b"x"
    await copying.close()
    await blobs.delete(uri)
    with pytest.raises(NotFound):
        await blobs.get_blob(uri)
