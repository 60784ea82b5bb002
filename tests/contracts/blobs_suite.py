"""The contract that every Blobs adapter keeps."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.ports.services import BlobExists, Blobs
from schemas.errors import NotFound


class BlobsSuite:
    """The contract."""

    async def test_a_put_object_is_read_back(self, blobs: Blobs, tmp_path: Path) -> None:
        uri = await blobs.put_blob("runs/r/objects/a", b"\0one")
        assert await blobs.get_blob(uri) == b"\0one"
        await blobs.put_blob("runs/r/objects/a", b"two")
        assert await blobs.get_blob(uri) == b"two"
        source = tmp_path / "source"
        source.write_bytes(b"three")
        assert await blobs.get_blob(await blobs.put_file("runs/r/file", source)) == b"three"

    async def test_large_content_comes_in_pieces(self, blobs: Blobs) -> None:
        data = bytes(range(256)) * (70 << 10)
        pieces = [piece async for piece in blobs.chunks(await blobs.put_blob("large", data))]
        assert b"".join(pieces) == data
        assert 1 < len(pieces) < 100
        assert [p async for p in blobs.chunks(await blobs.put_blob("empty", b""))] == []
        gone = await blobs.put_blob("gone", b"x")
        await blobs.delete(gone)
        with pytest.raises(NotFound):
            await anext(blobs.chunks(gone))

    async def test_a_part_of_the_content_is_read(self, blobs: Blobs) -> None:
        data = bytes(range(256)) * (36 << 10)
        uri = await blobs.put_blob("ranged", data)
        for start, stop in (
            (0, 1),
            (5, 5),
            (0, None),
            (3, 9 << 20),
            (len(data) - 2, len(data) + 9),
        ):
            read = [piece async for piece in blobs.chunks(uri, start=start, stop=stop)]
            assert b"".join(read) == data[start:stop], (start, stop)

    @pytest.mark.parametrize("size", [0, 1, 100, (8 << 20), (8 << 20) + 1, 20 << 20])
    async def test_content_is_stored_as_it_arrives(self, blobs: Blobs, size: int) -> None:
        data = (bytes(range(251)) * (size // 251 + 1))[:size]

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, size, 300_001):
                yield data[start : start + 300_001]

        stored = await blobs.put_stream("streamed/x", pieces())
        assert await blobs.get_blob(stored.uri) == data
        assert stored.size == size
        assert stored.sha256 == hashlib.sha256(data).hexdigest()

    async def test_content_that_ends_early_is_not_stored(self, blobs: Blobs) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * (1 << 20)
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await blobs.put_stream("streamed/y", pieces())
        assert await blobs.exists("streamed/y") is None

    async def test_create_only_has_one_winner(self, blobs: Blobs) -> None:
        async def write(n: int) -> bool:
            try:
                await blobs.put_blob("runs/r/ckpt/1/MANIFEST.json", b"%d" % n, create_only=True)
            except BlobExists:
                return False
            return True

        won = await asyncio.gather(*(write(n) for n in range(16)))
        assert sum(won) == 1
        uri = await blobs.exists("runs/r/ckpt/1/MANIFEST.json")
        assert uri is not None
        assert await blobs.get_blob(uri) == b"%d" % won.index(True)

    async def test_a_blob_that_is_gone_is_not_found(self, blobs: Blobs) -> None:
        uri = await blobs.put_blob("runs/r/x", b"x")
        await blobs.delete(uri)
        await blobs.delete(uri)
        assert await blobs.exists("runs/r/x") is None
        with pytest.raises(NotFound):
            await blobs.get_blob(uri)

    async def test_keys_are_listed_with_size_and_age(self, blobs: Blobs) -> None:
        names = ["datasets/d", "runs/r/objects/b", "runs/r/objects/a", "runs/rest/x"]
        uris = {name: await blobs.put_blob(name, name.encode()) for name in names}
        every = await blobs.keys("")
        assert [blob.key for blob in every] == sorted(names)
        for blob in every:
            assert blob.uri == uris[blob.key]
            assert blob.size == len(blob.key)
            assert abs(datetime.now(UTC) - blob.modified) < timedelta(minutes=5)
            assert await blobs.get_blob(blob.uri) == blob.key.encode()
        for prefix, num_keys in {
            "runs/": 3,
            "runs/r/": 2,
            "runs/r": 3,
            "runs/r/objects/a": 1,
        }.items():
            assert len(await blobs.keys(prefix)) == num_keys, prefix
        assert await blobs.keys("none/") == []
        await blobs.delete(uris["runs/rest/x"])
        assert len(await blobs.keys("runs/")) == 2

    @pytest.mark.parametrize("key", ["../x", "/x", "a//b", "a/../b", "", "a b", "a\n", "a/"])
    async def test_keys_stay_inside(self, blobs: Blobs, key: str) -> None:
        with pytest.raises(ValueError, match="not a blob key"):
            await blobs.put_blob(key, b"x")
        with pytest.raises(ValueError, match="not a blob key"):
            await blobs.put_blob(key, b"x", create_only=True)

    async def test_uris_stay_inside(self, blobs: Blobs) -> None:
        for uri in ("https://example.org/x", "s3://another-bucket/x", "file:///etc/passwd", "x"):
            with pytest.raises(NotFound):
                await blobs.get_blob(uri)
