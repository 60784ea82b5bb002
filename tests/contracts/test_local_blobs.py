"""A directory keeps the contract of blobs, and stays undamaged when the disk is full."""

import asyncio
import errno
import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.blobs import local
from infra.blobs.local import SHARED_BYTES, LocalBlobs
from schemas.errors import InvalidConfig, NotFound, StoreAway
from tests.contracts.blobs_suite import BlobsSuite
from tests.kit.disk import small_disk


class TestLocalBlobs(BlobsSuite):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> LocalBlobs:
        return LocalBlobs(tmp_path / "blobs")

    async def test_files_outside_stay_outside(self, blobs: LocalBlobs, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("x")
        with pytest.raises(NotFound):
            await blobs.get_blob(secret.as_uri())


async def test_files_of_others_are_not_listed(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    await blobs.put_blob("a", b"x")
    (tmp_path / "of others").touch()
    assert [blob.key for blob in await blobs.keys("")] == ["a"]


WEIGHTS = b"w" * SHARED_BYTES
SHA = hashlib.sha256(WEIGHTS).hexdigest()


def path_of(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


async def put(blobs: LocalBlobs, run: str, data: bytes = WEIGHTS, sha256: str = SHA) -> Path:
    return path_of(await blobs.put_blob(f"runs/{run}/objects/{sha256}", data, sha256=sha256))


def num_files(root: Path) -> int:
    """The number of different files below a directory."""
    return len({path.stat().st_ino for path in root.rglob("*") if path.is_file()})


async def test_equal_content_of_several_runs_is_stored_once(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    first, second = await put(blobs, "a"), await put(blobs, "b")
    assert first != second
    assert num_files(tmp_path) == 1
    assert [blob.key for blob in await blobs.keys("")] == [
        f"runs/a/objects/{SHA}",
        f"runs/b/objects/{SHA}",
    ]
    await blobs.delete(first.as_uri())
    assert await blobs.get_blob(second.as_uri()) == WEIGHTS
    await put(blobs, "c")
    assert num_files(tmp_path) == 1
    for run in "bc":
        await blobs.delete((tmp_path / f"runs/{run}/objects/{SHA}").as_uri())
    assert num_files(tmp_path) == 0, "the bytes go with the last run"


async def test_a_blob_that_shares_old_content_is_new(tmp_path: Path) -> None:
    """Otherwise it would be collected as an old orphan before its event names it."""
    blobs = LocalBlobs(tmp_path)
    os.utime(await put(blobs, "a"), (0, 0))
    await put(blobs, "b")
    [info] = await blobs.keys("runs/b/")
    assert (datetime.now(UTC) - info.modified).total_seconds() < 60


async def test_damaged_content_is_not_shared_but_replaced(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    first = await put(blobs, "a")
    first.write_bytes(b"x" * SHARED_BYTES)
    assert (await put(blobs, "b")).read_bytes() == WEIGHTS
    assert (await put(blobs, "a")).read_bytes() == WEIGHTS
    assert num_files(tmp_path) == 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
async def test_without_hard_links_each_blob_has_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    blobs = LocalBlobs(tmp_path)
    paths = [await put(blobs, run) for run in "ab"]
    assert [path.read_bytes() for path in paths] == [WEIGHTS] * 2
    for path in paths:
        await blobs.delete(path.as_uri())
    assert num_files(tmp_path) == 0


async def test_runs_that_come_and_go_at_once_never_lose_their_bytes(tmp_path: Path) -> None:
    stores = [LocalBlobs(tmp_path) for _ in range(8)]

    async def come_and_go(blobs: LocalBlobs, run: str) -> None:
        for _ in range(50):
            path = await put(blobs, run)
            await asyncio.sleep(0)
            assert await blobs.get_blob(path.as_uri()) == WEIGHTS
            await blobs.delete(path.as_uri())

    await asyncio.gather(*(come_and_go(one, f"r{n}") for n, one in enumerate(stores)))
    assert num_files(tmp_path) == 0


async def test_a_blob_can_be_deleted_while_another_run_deletes_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samefile = Path.samefile

    def after_the_shared_name_went(path: Path, shared: Path) -> bool:
        shared.unlink()
        return samefile(path, shared)

    blobs = LocalBlobs(tmp_path)
    path = await put(blobs, "a")
    monkeypatch.setattr(Path, "samefile", after_the_shared_name_went)
    await blobs.delete(path.as_uri())
    assert num_files(tmp_path) == 0


@pytest.mark.parametrize("is_old", [True, False])
async def test_a_start_removes_what_killed_writers_left_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    """One was killed while it wrote a blob, and one while it linked shared content that is deleted
    since. What is younger may be at work."""
    blobs = LocalBlobs(tmp_path)
    kept, path = await put(blobs, "kept", b"o" * SHARED_BYTES, "0" * 64), await put(blobs, "a")

    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", end)
        patched.setattr(Path, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            blobs._link_shared(tmp_path / "runs/b/objects" / SHA, WEIGHTS)
    (tmp_path / ".scratch" / "tmpx7c2").write_bytes(WEIGHTS)
    await blobs.delete(path.as_uri())
    monkeypatch.setattr(local, "LEFTOVER_S", 0.0 if is_old else 60.0)
    LocalBlobs(tmp_path)
    assert num_files(tmp_path) == (1 if is_old else 3)
    assert kept.read_bytes() == b"o" * SHARED_BYTES


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        InvalidConfig, match=r"blob directory .* cannot be created .*HEADRACE_BLOBS"
    ):
        LocalBlobs(tmp_path / "file" / "blobs")


async def test_a_full_disk_is_named_and_leaves_no_half_blob(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mb=1) as disk:
        await _fill(disk)


async def _fill(small_disk: Path) -> None:
    blobs = LocalBlobs(small_disk / "blobs")
    kept = await blobs.put_blob("runs/r/small", b"kept")
    with pytest.raises(StoreAway, match=r"full.*free space"):
        await blobs.put_blob("runs/r/large", b"x" * (2 << 20))
    assert await blobs.exists("runs/r/large") is None
    assert await blobs.get_blob(kept) == b"kept"
    assert await blobs.get_blob(await blobs.put_blob("runs/r/next", b"fits")) == b"fits"
