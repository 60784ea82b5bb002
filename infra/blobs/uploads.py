"""Uploads in parts: the parts of a file are stored as they arrive, in any order, and joined at the end.

A part may be sent again. The one that was acknowledged last counts, and its ETag is the SHA-256 of its
bytes. Parts are blobs below `uploads/`, so every process of the installation can join them. They are
deleted when the upload is closed, and what is left of an upload that nobody finishes is collected.

Where clients reach the blob store, they may send parts straight to it, below `uploads/direct/`. Such a
part is known when the upload is completed, and has the ETag that the store gave it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from infra.blobs.installed import InstalledBlobs
from infra.ports.direct_blobs import DirectBlobs, SentBlob
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, StoreAway

logger = logging.getLogger(__name__)

SQL = queries("infra/blobs/uploads.sql")

FOLDER = "uploads/"
DIRECT = f"{FOLDER}direct/"
MAX_BYTES = 5 << 30
WHOLE_BYTES = 64 << 20
"""A file up to this size is sent in one part."""
PART_BYTES = 16 << 20
MOST_PARTS = 10_000
EXPIRES = timedelta(days=1)
"""How long an upload may take."""

FORGOTTEN = timedelta(days=2)
"""Parts that are older belong to no upload any more."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload: how many bytes it has, and how many each part but the last has. `actor` is the API key
    and owner that began it as JSON text, and `workspace` the only one that may see it; None: all of
    `organisation` (an id; None: of `main`)."""

    id: str
    purpose: str
    size: int
    part_size: int
    status: str
    actor: str
    workspace: str | None
    organisation: str | None
    created_at: datetime

    @property
    def num_parts(self) -> int:
        return -(-self.size // self.part_size)

    def bytes_of(self, part: int) -> int:
        """How many bytes a part has. Parts count from 1. Raises NotFound when there is no such part."""
        if not 1 <= part <= self.num_parts:
            raise NotFound(
                f"upload {self.id} has the parts 1 to {self.num_parts}, and no part {part}"
            )
        return min(self.part_size, self.size - (part - 1) * self.part_size)

    @property
    def folder(self) -> str:
        """The keys of the parts that clients send straight to the store begin with this. It is the only
        place that their URLs name, and is below the workspace or organisation of the upload."""
        return f"{DIRECT}{self.workspace or self.organisation or 'main'}/{self.id}/"


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A part that has arrived: its number, its ETag and the URI of its bytes."""

    number: int
    etag: str
    uri: str


def check_size(size: int) -> None:
    """Raises InvalidConfig when no upload can have this many bytes."""
    if not 1 <= size <= MAX_BYTES:
        message = f"must be from 1 byte to {MAX_BYTES >> 30} GiB, got {size}"
        raise InvalidConfig(f"file_size {message}", issues=(Issue("file_size", message),))


def part_bytes(size: int) -> int:
    """How many bytes each part but the last has, for a file of `size` bytes."""
    if size <= WHOLE_BYTES:
        return max(1, size)
    least = -(-size // MOST_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


def check_parts(
    upload: Upload, found: Mapping[int, UploadPart], named: Sequence[tuple[int, str]]
) -> None:
    """Check that a client names each part once, in order, with the ETag that it was answered. Raises
    InvalidConfig."""
    numbers = [number for number, _ in named]
    wanted = list(range(1, upload.num_parts + 1))
    if numbers != wanted:
        missing = [number for number in wanted if number not in numbers]
        why = (
            f"part {missing[0]} is missing; name all parts from 1 to {upload.num_parts}"
            if missing
            else f"name each part once, in order from 1 to {upload.num_parts}"
        )
        raise _bad_parts(why)
    for number, etag in named:
        part = found.get(number)
        if part is None:
            raise _bad_parts(f"part {number} has not arrived; send it again")
        if etag.strip('"') != part.etag:
            raise _bad_parts(
                f"part {number} has the ETag {part.etag}, not {etag[:80]}; send the part again, and "
                "name the ETag of the answer"
            )


class UploadStore:
    """The uploads of an installation."""

    def __init__(self, database: Database, blobs: InstalledBlobs) -> None:
        self._pool = database.durable
        self._blobs = blobs

    async def begin(
        self,
        upload: str,
        purpose: str,
        size: int,
        *,
        actor: str,
        workspace: str | None,
        organisation: str | None,
    ) -> Upload:
        """Expect a file of `size` bytes. Raises InvalidConfig when it is empty or too large."""
        check_size(size)
        row = await self._pool.fetchrow(
            SQL["begin"],
            upload,
            purpose,
            size,
            part_bytes(size),
            actor,
            workspace,
            organisation,
        )
        return Upload(**row)

    async def find(self, upload: str) -> Upload:
        """An upload by its id. Raises NotFound."""
        row = await self._pool.fetchrow(SQL["find"], upload)
        if row is None:
            raise NotFound(f"there is no upload {upload[:80]}; begin another one")
        return Upload(**row)

    async def find_unfinished(
        self, purpose: str, size: int, *, workspace: str | None, organisation: str | None
    ) -> Upload | None:
        """The newest upload for this purpose and of this size that has not ended."""
        row = await self._pool.fetchrow(
            SQL["find_unfinished"], purpose, size, workspace, organisation
        )
        return None if row is None else Upload(**row)

    async def parts(self, upload: str) -> dict[int, UploadPart]:
        """The parts that have arrived, by their numbers."""
        rows = await self._pool.fetch(SQL["parts"], upload)
        return {row["part"]: UploadPart(row["part"], row["etag"], row["uri"]) for row in rows}

    @property
    def sends_direct(self) -> bool:
        """Whether clients send parts straight to the blob store."""
        return self._blobs.direct is not None and self._blobs.direct.is_public

    async def direct_urls(self, upload: Upload, *, for_s: int) -> list[str] | None:
        """The URLs of the store for all parts, in order. None where clients send parts to us."""
        if self._blobs.direct is None or not self.sends_direct:
            return None
        wanted = [
            (f"{upload.folder}{part}", upload.bytes_of(part))
            for part in range(1, upload.num_parts + 1)
        ]
        return await self._blobs.direct.put_urls(wanted, for_s=for_s)

    async def admit(self, upload: Upload) -> dict[int, UploadPart]:
        """Count the parts that clients have sent straight to the store, if they have the size that
        they must have. Returns all parts that have arrived."""
        found = await self.parts(upload.id)
        if self._blobs.direct is None or upload.status != "open":
            return found
        for key, blob in (await self._blobs.direct.list_sent(upload.folder)).items():
            text = key.removeprefix(upload.folder)
            part = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
            held = found.get(part)
            is_ours = held is not None and held.uri != blob.uri
            if not 1 <= part <= upload.num_parts or is_ours or blob.size != upload.bytes_of(part):
                continue
            if held is None or held.etag != blob.etag:
                await self._pool.fetchrow(SQL["put_part"], upload.id, part, blob.etag, blob.uri)
                found[part] = UploadPart(part, blob.etag, blob.uri)
        return found

    async def receive(self, upload: Upload, part: int, body: AsyncIterator[bytes]) -> UploadPart:
        """Store the bytes of a part. Raises InvalidConfig when they are more or fewer than its size,
        NotFound when there is no such part, and Conflict when no part is expected any more."""
        size = upload.bytes_of(part)
        _require_open(upload)
        key = f"{FOLDER}{upload.id}/{part}.{uuid4().hex}"
        stored = await self._blobs.put_stream(key, _exactly(body, size))
        try:
            former = await self._pool.fetchrow(
                SQL["put_part"], upload.id, part, stored.sha256, stored.uri
            )
        except BaseException:
            await asyncio.shield(self._blobs.delete(stored.uri))
            raise
        if former is None:
            await self._blobs.delete(stored.uri)
            _require_open(await self.find(upload.id))
            raise Conflict(f"upload {upload.id} expects no parts any more; begin another one")
        if former["uri"] is not None:
            await self._blobs.delete(former["uri"])
        return UploadPart(part, stored.sha256, stored.uri)

    async def join(self, upload: Upload, named: Sequence[tuple[int, str]] | None) -> None:
        """Complete an upload whose parts have all arrived. `named` are their numbers and ETags; None
        names those that have arrived. Doing so again changes nothing. Raises InvalidConfig, and Conflict
        when the upload was aborted."""
        if upload.status == "complete":
            return
        _require_open(upload)
        found = await self.admit(upload)
        if named is None:
            named = [(number, part.etag) for number, part in sorted(found.items())]
        check_parts(upload, found, named)
        etags = [etag.strip('"') for _, etag in named]
        if await self._pool.fetchval(SQL["complete"], upload.id, etags) is None:
            await self.join(
                await self.find(upload.id), named
            )  # something changed since it was read

    async def chunks(self, upload: Upload) -> AsyncIterator[bytes]:
        """Yield the bytes of a complete upload. Raises Conflict when a part was replaced at the store
        after the upload was completed."""
        direct = self._blobs.direct
        for number, part in sorted((await self.parts(upload.id)).items()):
            if direct is not None and part.uri.endswith(f"/{upload.folder}{number}"):
                sent = SentBlob(part.uri, upload.bytes_of(number), part.etag)
                pieces = direct.read_sent(sent)
            else:
                pieces = self._blobs.chunks(part.uri)
            async for piece in pieces:
                yield piece

    async def close(self, upload: str) -> None:
        """End an upload and delete its parts. It may be closed already."""
        found = await self.find(upload)
        uris = {row["uri"] for row in await self._pool.fetch(SQL["close"], upload)}
        if self._blobs.direct is not None:
            uris |= {
                blob.uri for blob in (await self._blobs.direct.list_sent(found.folder)).values()
            }
        for uri in uris:
            await self._blobs.delete(uri)
        await self._pool.execute(SQL["forget_parts"], upload)

    async def collect(self, *, now: datetime | None = None) -> int:
        """Close the uploads that nobody finished in time, and delete parts that no upload has. Returns
        how many parts of the latter kind were deleted. At an S3 store, what is left of our own writes
        in parts is aborted too."""
        now = now or datetime.now(UTC)
        for row in await self._pool.fetch(SQL["unfinished"], now - EXPIRES):
            await self.close(row["id"])
        await self._pool.execute(SQL["forget_old"], now - FORGOTTEN)
        count = 0
        for blob in await self._blobs.keys(FOLDER):
            if blob.modified < now - FORGOTTEN and not await self._pool.fetchval(
                SQL["is_part"], blob.uri
            ):
                await self._blobs.delete(blob.uri)
                count += 1
        if self._blobs.direct is not None:
            await self._abort_unfinished(self._blobs.direct, before=now - FORGOTTEN)
        return count

    async def _abort_unfinished(self, direct: DirectBlobs, *, before: datetime) -> None:
        try:
            count = await direct.abort_unfinished(before=before)
        except StoreAway as error:  # the store may not grant s3:ListBucketMultipartUploads
            logger.info("uploads that processes left unfinished at the store are kept: %s", error)
            return
        if count:
            logger.info("aborted %s uploads that processes left unfinished at the store", count)


async def _exactly(body: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """The same pieces. Raises InvalidConfig when they have more or fewer bytes than `size`."""
    left = size
    async for piece in body:
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        more = f"more than {size}" if left < 0 else f"{size - left}"
        message = f"must have exactly {size} bytes, got {more}; send it again"
        raise InvalidConfig(f"the body {message}", issues=(Issue("body", message),))


def _require_open(upload: Upload) -> None:
    if upload.status != "open":
        how = "is complete" if upload.status == "complete" else "was aborted or has ended"
        raise Conflict(
            f"upload {upload.id} {how}, and expects no parts any more; begin another one"
        )


def _bad_parts(message: str) -> InvalidConfig:
    return InvalidConfig(message, issues=(Issue("parts", message),))
