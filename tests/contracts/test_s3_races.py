"""Many writers of one manifest: one wins, and no reader ever sees other or partial content."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from infra.blobs.s3.store import S3Blobs
from infra.ports.services import BlobExists
from schemas.errors import NotFound
from tests.kit.s3 import Bucket

pytestmark = [pytest.mark.s3, pytest.mark.slow]

ROUNDS = 100
WRITERS = 16
READERS = 2
SIZE = 20_000


class Overwriting(S3Blobs):
    """A store without create-only writes."""

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        return await super().put_blob(key, data, sha256=sha256)


@dataclass
class Race:
    """The results of the writers of one key."""

    winners: list[int] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    torn: int = 0


def content(writer: int) -> bytes:
    """The content of a writer: as long as any other's, and made of a single repeated byte."""
    return bytes([writer]) * SIZE


async def race(writers: Sequence[S3Blobs], key: str) -> Race:
    """Run all writers at once, together with readers that read until they have read the end."""
    found, over = Race(), asyncio.Event()
    reader = writers[0]
    uri = f"{reader._place.uri(key)}"

    async def write(number: int, blobs: S3Blobs) -> None:
        try:
            await blobs.put_blob(key, content(number), create_only=True)
        except BlobExists:
            return
        found.winners.append(number)

    async def read() -> None:
        last = False
        while not last:
            last = over.is_set()
            try:
                data = await reader.get_blob(uri)
            except NotFound:
                continue
            found.seen.add(hashlib.sha256(data).hexdigest())
            found.torn += data not in {content(number) for number in range(len(writers))}

    readers = [asyncio.ensure_future(read()) for _ in range(READERS)]
    await asyncio.gather(*(write(n, blobs) for n, blobs in enumerate(writers)))
    over.set()
    await asyncio.gather(*readers)
    return found


async def test_sixteen_writers_a_hundred_times_have_one_winner_each(bucket: Bucket) -> None:
    stores = [bucket.blobs() for _ in range(4)]
    for step in range(ROUNDS):
        writers = [stores[n % len(stores)] for n in range(WRITERS)]
        found = await race(writers, f"runs/r/ckpt/{step}/MANIFEST.json")
        assert len(found.winners) == 1
        assert found.seen == {hashlib.sha256(content(found.winners[0])).hexdigest()}
        assert found.torn == 0
    assert len(bucket.contents()) == ROUNDS


async def test_twin_without_create_only_writes_it_has_many(bucket: Bucket) -> None:
    blobs = Overwriting(bucket.store())
    found = await race([blobs] * WRITERS, "runs/r/ckpt/1/MANIFEST.json")
    assert len(found.winners) == WRITERS
    assert found.torn == 0
