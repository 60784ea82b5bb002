"""Uploads large content to an S3 store in parts, so that only a lost part is sent again.

The content cannot be read before the last request, which joins the parts. An upload that fails before
that is also aborted at the store. An upload whose process was killed leaves invisible parts behind. They
take space until a lifecycle rule of the bucket removes them (`AbortIncompleteMultipartUpload`).
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infra.blobs.s3.client import S3Store
from infra.blobs.s3.errors import require_fields
from infra.ports.services import BlobExists
from schemas.errors import NotFound, TransientError

WHOLE_BYTES = 32 << 20
"""Content up to this size is sent in one request."""
PART_BYTES = 16 << 20
MOST_PARTS = 10_000
"""S3's own limit."""
AT_ONCE = 4
"""How many parts of one upload are sent at once. Each is in memory meanwhile."""


@dataclass(frozen=True, slots=True)
class UploadSource:
    """Content to upload. `read(start, size)` gives a piece of it."""

    size: int
    sha256: str
    read: Callable[[int, int], bytes]

    @classmethod
    def of_bytes(cls, data: bytes, sha256: str) -> "UploadSource":
        view = memoryview(data)
        return cls(
            size=len(data),
            sha256=sha256,
            read=lambda start, size: bytes(view[start : start + size]),
        )

    @classmethod
    def of_file(cls, path: Path) -> "UploadSource":
        """Reads the file once, for its hash."""
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(size=path.stat().st_size, sha256=sha256, read=partial(_piece, path))


async def upload(
    store: S3Store, object_key: str, source: UploadSource, metadata: Mapping[str, str]
) -> None:
    """Upload in parts. Raises NotFound when the store does not know the upload any more: it was aborted,
    or it was joined and the answer was lost."""
    where = {"Bucket": store.place.bucket, "Key": object_key}
    begun = await store.call(store.client.create_multipart_upload, **where, Metadata=dict(metadata))
    where["UploadId"] = begun["UploadId"]
    try:
        parts = await _send(store, where, source)
        await store.call(
            store.client.complete_multipart_upload, **where, MultipartUpload={"Parts": parts}
        )
    except BaseException:
        await _give_up(store, where)
        raise


class StreamedUpload:
    """Content that is uploaded as it arrives, block by block. While one block is sent, the next one may
    arrive. Content of one block is sent in one request."""

    def __init__(self, store: S3Store, object_key: str, metadata: Mapping[str, str]) -> None:
        self._store = store
        self._where: dict[str, Any] = {"Bucket": store.place.bucket, "Key": object_key}
        self._metadata = dict(metadata)
        self._held: bytes | None = None
        self._hash = hashlib.sha256()
        self._parts: list[dict[str, Any]] = []
        self._sending: asyncio.Task[dict[str, Any]] | None = None
        self._number = 0
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    async def send(self, block: bytes) -> None:
        """Take the next block, after the block before the last one was sent."""
        self.size += len(block)
        await asyncio.to_thread(self._hash.update, block)
        held, self._held = self._held, block
        if held is not None:
            await self._send_part(held)

    async def finish(self) -> None:
        """Send the rest, and join the parts. The content can be read when this returns."""
        last = self._held or b""
        if not self._number:
            await self._store.call(
                self._store.client.put_object, **self._where, Body=last, Metadata=self._metadata
            )
            return
        await self._send_part(last)
        await self._await_part()
        try:
            await self._store.call(
                self._store.client.complete_multipart_upload,
                **self._where,
                MultipartUpload={"Parts": self._parts},
            )
        except NotFound as error:
            raise TransientError(
                "the upload to the S3 store was ended by another client, or its answer was lost; "
                "send the content again"
            ) from error

    async def give_up(self) -> None:
        """End an upload that is not finished, and abort it at the store, if it answers."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        if self._number:
            await _give_up(self._store, self._where)

    async def _send_part(self, block: bytes) -> None:
        await self._await_part()
        if not self._number:
            begun = await self._store.call(
                self._store.client.create_multipart_upload, **self._where, Metadata=self._metadata
            )
            self._where["UploadId"] = begun["UploadId"]
        self._number += 1
        source = UploadSource(len(block), "", lambda start, size: block[start : start + size])
        self._sending = asyncio.ensure_future(
            _send_one(
                self._store, self._where, source, number=self._number, start=0, size=len(block)
            )
        )

    async def _await_part(self) -> None:
        if self._sending is not None:
            self._parts.append(await self._sending)
            self._sending = None


async def _send(
    store: S3Store, where: Mapping[str, str], source: UploadSource
) -> list[dict[str, Any]]:
    """Send all parts, a few at a time. Returns what the store needs to join them."""
    size = part_bytes(source.size)
    starts = range(0, source.size, size)
    sent: list[dict[str, Any]] = []
    for first in range(0, len(starts), AT_ONCE):
        batch = await asyncio.gather(
            *(
                _send_one(store, where, source, number=number, start=starts[number - 1], size=size)
                for number in range(first + 1, min(first + AT_ONCE, len(starts)) + 1)
            ),
            return_exceptions=True,
        )
        for part in batch:
            if isinstance(part, BaseException):
                raise part
            sent.append(part)
    return sent


async def _send_one(
    store: S3Store,
    where: Mapping[str, str],
    source: UploadSource,
    *,
    number: int,
    start: int,
    size: int,
) -> dict[str, Any]:
    def send() -> str:
        body = source.read(start, size)
        sent = store.client.upload_part(**where, PartNumber=number, Body=body)
        return str(require_fields(sent, "ETag")["ETag"])

    return {"PartNumber": number, "ETag": await store.call(send)}


async def _give_up(store: S3Store, where: Mapping[str, str]) -> None:
    """Abort the upload at the store, if it answers."""
    with suppress(NotFound, BlobExists, TransientError):
        await store.with_patience(0.0).call(store.client.abort_multipart_upload, **where)


def part_bytes(size: int) -> int:
    """How large the parts of `size` bytes are. They are as small as the limit on their number allows."""
    least = -(-size // MOST_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


def _piece(path: Path, start: int, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)
