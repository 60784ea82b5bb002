"""URLs of the S3 store itself, signed with its own keys (Signature Version 4).

The signature covers the method, the key, the time at which the URL expires, and the length of a body. A
store refuses other headers of its own kind, such as an ACL, because they are not signed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import quote

from infra.blobs.s3.client import Keys, S3Store
from infra.blobs.s3.errors import require_fields
from infra.ports.direct_blobs import SentBlob
from infra.ports.services import BlobExists
from infra.settings.blob_keys import check_prefix
from schemas.errors import Conflict, NotFound

CHUNK_BYTES = 8 << 20


class S3Direct:
    """`infra.ports.direct_blobs.DirectBlobs` of one bucket. `public_endpoint` is the address at which
    clients reach the store; None: they do not."""

    def __init__(
        self, store: S3Store, *, public_endpoint: str | None, keys: Keys | None = None
    ) -> None:
        self._store = store
        self._client = store.client
        self._place = store.place
        self._public = (
            None
            if public_endpoint is None
            else S3Store(store.place, endpoint=public_endpoint, keys=keys)
        )

    @property
    def is_public(self) -> bool:
        return self._public is not None

    def close(self) -> None:
        if self._public is not None:
            self._public.close()

    async def put_urls(self, wanted: Sequence[tuple[str, int]], *, for_s: int) -> list[str]:
        def sign() -> list[str]:
            return [
                self._sign(
                    "put_object", for_s, Key=self._place.object_key(key), ContentLength=length
                )
                for key, length in wanted
            ]

        return await asyncio.to_thread(sign)

    async def get_url(self, uri: str, *, file_name: str, for_s: int) -> str | None:
        try:
            object_key = self._place.object_key_of(uri)
        except NotFound:
            return None
        return await asyncio.to_thread(
            self._sign,
            "get_object",
            for_s,
            Key=object_key,
            ResponseContentType="application/octet-stream",
            ResponseContentDisposition=f"attachment; filename*=utf-8''{quote(file_name)}",
        )

    async def list_sent(self, prefix: str) -> Mapping[str, SentBlob]:
        check_prefix(prefix)
        found: dict[str, SentBlob] = {}
        async for entry in self._pages(
            self._client.list_objects_v2,
            "Contents",
            {"ContinuationToken": "NextContinuationToken"},
            self._place.object_prefix(prefix),
        ):
            key = self._place.key(entry["Key"])
            uri, etag = f"s3://{self._place.bucket}/{entry['Key']}", entry["ETag"].strip('"')
            found[key] = SentBlob(uri, entry["Size"], etag)
        return found

    async def read_sent(self, blob: SentBlob) -> AsyncIterator[bytes]:
        where = {"Bucket": self._place.bucket, "Key": self._place.object_key_of(blob.uri)}
        for first in range(0, blob.size, CHUNK_BYTES):
            last = min(first + CHUNK_BYTES, blob.size) - 1
            span = {"Range": f"bytes={first}-{last}", "IfMatch": f'"{blob.etag}"'}
            try:
                piece = await self._store.call(self._read, **where, **span)
            except (BlobExists, NotFound) as error:  # 412 or 404: it has another ETag, or is gone
                raise Conflict(
                    "a part was replaced after the upload was completed; begin another upload"
                ) from error
            yield piece

    async def abort_unfinished(self, *, before: datetime) -> int:
        count = 0
        async for entry in self._pages(
            self._client.list_multipart_uploads,
            "Uploads",
            {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
            self._place.object_prefix(""),
        ):
            if entry["Initiated"] < before:
                where = {"Key": entry["Key"], "UploadId": entry["UploadId"]}
                await self._abort(where)
                count += 1
        return count

    async def _abort(self, where: Mapping[str, str]) -> None:
        with suppress(NotFound):  # another process ended it
            await self._store.call(
                self._client.abort_multipart_upload, Bucket=self._place.bucket, **where
            )

    async def _pages(
        self, request: Callable[..., Any], items: str, markers: Mapping[str, str], prefix: str
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The entries of all pages of a listing. `markers` names the arguments that ask for the next
        page, and the fields of a page that hold their values."""

        def page(**arguments: str) -> Mapping[str, Any]:
            return require_fields(request(**arguments), "IsTruncated")

        arguments = {"Bucket": self._place.bucket, "Prefix": prefix}
        while True:
            found = await self._store.call(page, **arguments)
            for entry in found.get(items, ()):
                yield entry
            if not found["IsTruncated"]:
                return
            arguments |= {name: found[field] for name, field in markers.items()}

    def _read(self, **where: str) -> bytes:
        answer = self._client.get_object(**where)
        with answer["Body"] as body:
            require_fields(answer, "ContentLength")
            data: bytes = body.read()
            return data

    def _sign(self, operation: str, for_s: int, **parameters: object) -> str:
        if self._public is None:
            raise ValueError("this store has no public endpoint")
        url: str = self._public.client.generate_presigned_url(
            operation, Params={"Bucket": self._place.bucket, **parameters}, ExpiresIn=for_s
        )
        return url
