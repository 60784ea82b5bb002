"""Unpacked snapshots are removed when there are too many, and never while they are used."""

import asyncio
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from infra.sandbox import trees
from infra.sandbox.trees import UnpackedTrees
from schemas.errors import CorruptData


def snapshot(number: int, *, size: int = 10) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        member = tarfile.TarInfo(f"file-{number}")
        member.size = size
        tar.addfile(member, io.BytesIO(b"x" * size))
    return written.getvalue()


async def hold(held: UnpackedTrees, number: int, *, size: int = 10) -> Path:
    async def fetch() -> bytes:
        return snapshot(number, size=size)

    return await held.hold(str(number), fetch)


async def use(held: UnpackedTrees, number: int, *, size: int = 10) -> Path:
    directory = await hold(held, number, size=size)
    held.release(str(number))
    return directory


async def test_the_snapshots_that_were_used_last_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST_TREES", 3)
    held = UnpackedTrees(tmp_path)
    first = await use(held, 1)
    second = await use(held, 2)
    await use(held, 3)
    assert await use(held, 1) == first
    await use(held, 4)
    assert not second.exists()
    assert (first / "file-1").exists()
    assert len(list(tmp_path.iterdir())) == 3


async def test_twin_without_a_limit_all_stay(tmp_path: Path) -> None:
    held = UnpackedTrees(tmp_path)
    for number in range(10):
        await use(held, number)
    assert len(list(tmp_path.iterdir())) == 10


async def test_large_snapshots_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "KEPT_BYTES", 100_000)
    held = UnpackedTrees(tmp_path)
    first = await use(held, 1, size=60_000)
    second = await use(held, 2, size=60_000)
    assert not first.exists()
    assert second.exists()


async def test_a_snapshot_that_is_used_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST_TREES", 1)
    held = UnpackedTrees(tmp_path)
    first = await hold(held, 1)
    await use(held, 2)
    await use(held, 3)
    assert first.exists()
    held.release("1")
    await use(held, 4)
    assert not first.exists()


async def test_two_uses_at_once_unpack_it_once(tmp_path: Path) -> None:
    held = UnpackedTrees(tmp_path)
    first, second = await asyncio.gather(hold(held, 1), hold(held, 1))
    assert first == second
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_snapshot_that_cannot_be_unpacked_leaves_nothing(tmp_path: Path) -> None:
    held = UnpackedTrees(tmp_path)

    async def fetch() -> bytes:
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("../outside"))
        return written.getvalue()

    digest = hashlib.sha256(b"").hexdigest()
    with pytest.raises(CorruptData):
        await held.hold(digest, fetch)
    assert list(tmp_path.iterdir()) == []
    await use(held, 1)
