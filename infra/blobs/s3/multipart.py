"""Large content goes to an S3 store in parts: a part that is lost is sent again, not the whole.

Nothing of it can be read before the last request, which joins the parts; what fails before that is
given up at the store too. An upload whose process was killed leaves invisible parts behind, which cost
space until a rule of the bucket ends them (`AbortIncompleteMultipartUpload`).
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
"""Up to here content is sent in one request."""
PART_BYTES = 16 << 20
MOST_PARTS = 10_000
"""S3's own limit."""
AT_ONCE = 4
"""Parts of one upload that are under way together; each is in memory while it is."""


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
    """Upload in parts. Raises NotFound when the store forgot the upload before it was joined: or
    joined it, and its answer was lost."""
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


async def _send(
    store: S3Store, where: Mapping[str, str], source: UploadSource
) -> list[dict[str, Any]]:
    """All parts, a few at a time; what the store needs to join them."""
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
    """Tell the store to forget the parts, if it listens."""
    with suppress(NotFound, BlobExists, TransientError):
        await store.with_patience(0.0).call(store.client.abort_multipart_upload, **where)


def part_bytes(size: int) -> int:
    """How large the parts of `size` bytes are: as small as the limit on their number allows."""
    least = -(-size // MOST_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


def _piece(path: Path, start: int, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)
