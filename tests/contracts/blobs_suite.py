"""What every Blobs does."""

import asyncio
from pathlib import Path

import pytest

from infra.ports import BlobExists, Blobs
from schemas.errors import NotFound


class BlobsSuite:
    """The laws of blobs."""

    async def test_what_is_put_is_got(self, blobs: Blobs, tmp_path: Path) -> None:
        uri = await blobs.put("runs/r/objects/a", b"\0one")
        assert await blobs.get(uri) == b"\0one"
        await blobs.put("runs/r/objects/a", b"two")
        assert await blobs.get(uri) == b"two"
        source = tmp_path / "source"
        source.write_bytes(b"three")
        assert await blobs.get(await blobs.put_file("runs/r/file", source)) == b"three"

    async def test_create_only_has_one_winner(self, blobs: Blobs) -> None:
        async def write(n: int) -> bool:
            try:
                await blobs.put("runs/r/ckpt/1/MANIFEST.json", b"%d" % n, create_only=True)
            except BlobExists:
                return False
            return True

        won = await asyncio.gather(*(write(n) for n in range(16)))
        assert sum(won) == 1
        uri = await blobs.exists("runs/r/ckpt/1/MANIFEST.json")
        assert uri is not None
        assert await blobs.get(uri) == b"%d" % won.index(True)

    async def test_what_is_gone_is_not_found(self, blobs: Blobs) -> None:
        uri = await blobs.put("runs/r/x", b"x")
        await blobs.delete(uri)
        await blobs.delete(uri)
        assert await blobs.exists("runs/r/x") is None
        with pytest.raises(NotFound):
            await blobs.get(uri)
