"""A directory keeps the contract of blobs, and stays undamaged when the disk is full."""

from pathlib import Path

import pytest

from infra.blobs.local import LocalBlobs
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
            await blobs.get(secret.as_uri())


async def test_files_of_others_are_not_listed(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    await blobs.put("a", b"x")
    (tmp_path / "of others").touch()
    assert [blob.key for blob in await blobs.keys("")] == ["a"]


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
    kept = await blobs.put("runs/r/small", b"kept")
    with pytest.raises(StoreAway, match=r"full.*free space"):
        await blobs.put("runs/r/large", b"x" * (2 << 20))
    assert await blobs.exists("runs/r/large") is None
    assert await blobs.get(kept) == b"kept"
    assert await blobs.get(await blobs.put("runs/r/next", b"fits")) == b"fits"
