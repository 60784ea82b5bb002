"""Blobs in a bucket of an S3 store: durable on return, never torn, create-only on request.

Each object carries the SHA-256 of its content and the id of the write that made it. Every reader checks
the hash. The id settles what a create-only write leaves open: when a try gets no answer and the next one
finds the key taken, the id says whether our own first try took it.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from infra.blobs.s3.client import S3Store
from infra.blobs.s3.direct import S3Direct
from infra.blobs.s3.errors import StoreRefuses, require_fields
from infra.blobs.s3.multipart import WHOLE_BYTES, StreamedUpload, UploadSource, upload
from infra.blobs.streamed import blocks_of
from infra.ports.services import BlobExists, BlobInfo, StreamedBlob
from infra.settings.blob_keys import check_prefix, is_key
from infra.settings.s3 import S3Place
from schemas.errors import CorruptData, InvalidConfig, NotFound, TransientError

SHA256 = "sha256"
PUT = "put"
"""The names of our metadata on every object."""

CHUNK_BYTES = 8 << 20
STREAMED_BYTES = 8 << 20
"""The parts of content that is stored as it arrives. Three of them are in memory at a time."""

PROBE_PATIENCE_S = 10.0
"""A mistyped name should be reported soon after a process starts."""


class S3Blobs:
    """`infra.ports.services.Blobs` in one bucket, below one prefix. `direct` makes URLs of the store."""

    def __init__(self, store: S3Store, *, direct: S3Direct | None = None) -> None:
        self.direct = direct
        self._store = store
        self._client = store.client
        self._place = store.place

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        if sha256 is None:
            sha256 = await asyncio.to_thread(_hash, data)
        if create_only:
            await self._create(key, data, _metadata_of(sha256))
        elif len(data) > WHOLE_BYTES:
            await self._put_parts(key, UploadSource.of_bytes(data, sha256))
        else:
            await self._store.call(
                self._client.put_object, **self._at(key), Body=data, Metadata=_metadata_of(sha256)
            )
        return self._place.uri(key)

    async def put_file(self, key: str, path: Path) -> str:
        if (await asyncio.to_thread(path.stat)).st_size <= WHOLE_BYTES:
            return await self.put_blob(key, await asyncio.to_thread(path.read_bytes))
        await self._put_parts(key, await asyncio.to_thread(UploadSource.of_file, path))
        return self._place.uri(key)

    async def get_blob(self, uri: str) -> bytes:
        """Raises NotFound, and CorruptData when the store returns other bytes than were written."""
        where = {"Bucket": self._place.bucket, "Key": self._place.object_key_of(uri)}
        for _ in range(2):
            data = await self._store.call(self._get_verified, where=where)
            if data is not None:
                return data
        raise CorruptData(
            f"{uri} does not have the sha256 of what was written there; bring it back from a backup"
        )

    async def put_stream(self, key: str, body: AsyncIterator[bytes]) -> StreamedBlob:
        sending = StreamedUpload(self._store, self._place.object_key(key), {PUT: uuid4().hex})
        try:
            async for block in blocks_of(body, STREAMED_BYTES):
                await sending.send(block)
            await sending.finish()
        except BaseException:
            await asyncio.shield(sending.give_up())
            raise
        return StreamedBlob(self._place.uri(key), sending.size, sending.sha256)

    async def chunks(
        self, uri: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        where = {"Bucket": self._place.bucket, "Key": self._place.object_key_of(uri)}
        about = await self._store.call(self._head, where=where)
        end = about["ContentLength"] if stop is None else min(stop, about["ContentLength"])
        for first in range(start, end, CHUNK_BYTES):
            span = {"Range": f"bytes={first}-{min(first + CHUNK_BYTES, end) - 1}"}
            piece, _ = await self._store.call(self._read, where={**where, **span})
            yield piece

    async def delete(self, uri: str) -> None:
        object_key = self._place.object_key_of(uri)
        await self._store.call(
            self._client.delete_object, Bucket=self._place.bucket, Key=object_key
        )

    async def file(self, uri: str) -> Path | None:
        return None

    async def exists(self, key: str) -> str | None:
        return None if await self._metadata(key) is None else self._place.uri(key)

    async def keys(self, prefix: str) -> Sequence[BlobInfo]:
        check_prefix(prefix)
        found: list[BlobInfo] = []
        arguments = {"Bucket": self._place.bucket, "Prefix": self._place.object_prefix(prefix)}
        while True:
            page = await self._store.call(self._page, arguments=arguments)
            for entry in page.get("Contents", ()):
                key = self._place.key(entry["Key"])
                if is_key(key):
                    uri = self._place.uri(key)
                    found.append(BlobInfo(key, uri, entry["Size"], entry["LastModified"]))
            if not page.get("IsTruncated"):
                return found
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    async def probe(self) -> None:
        """Check, with a small object of our own, that the store can do what we need. Raises
        InvalidConfig, which says what to change, and TransientError when the store does not answer."""
        try:
            await S3Blobs(self._store.with_patience(PROBE_PATIENCE_S))._prove()
        except StoreRefuses as error:
            raise InvalidConfig(f"HEADRACE_BLOBS is {self._place}, but {error}") from error
        except (BlobExists, NotFound) as error:
            raise InvalidConfig(
                f"HEADRACE_BLOBS is {self._place}, but the server at {self._store.address} does not "
                f"do what an S3 store does ({error}); correct HEADRACE_S3_ENDPOINT"
            ) from error

    async def _prove(self) -> None:
        key = f".probe/{uuid4().hex}"
        uri = await self.put_blob(key, b"first", create_only=True)
        try:
            await self._prove_on(key, uri)
        finally:
            await self.delete(uri)

    async def _prove_on(self, key: str, uri: str) -> None:
        """`key` was just created."""
        with suppress(BlobExists):
            await self.put_blob(key, b"second", create_only=True)
        if await self.get_blob(uri) != b"first":
            raise StoreRefuses(
                f"the S3 store at {self._store.address} overwrites what it must only create "
                "(PutObject with If-None-Match: *); use one with conditional writes"
            )
        if [blob.key for blob in await self.keys(key)] != [key]:
            raise StoreRefuses(
                f"the S3 store at {self._store.address} does not list what was just written; use one "
                "that is strongly consistent"
            )

    async def _create(self, key: str, data: bytes, metadata: dict[str, str]) -> None:
        """Write unless the key is taken. Raises BlobExists when another writer took it."""
        try:
            await self._store.call(
                self._client.put_object,
                **self._at(key),
                Body=data,
                Metadata=metadata,
                IfNoneMatch="*",
            )
        except BlobExists as error:
            if not await self._made_by(metadata[PUT], key):
                raise BlobExists(self._place.uri(key)) from error

    async def _made_by(self, put: str, key: str) -> bool:
        """Whether an object was made by the write with this id. It is read in full, because a cut answer
        to HEAD cannot be told from a complete one."""
        try:
            _, metadata = await self._store.call(self._read, where=self._at(key))
        except NotFound:
            return False
        return metadata.get(PUT) == put

    async def _put_parts(self, key: str, source: UploadSource) -> None:
        try:
            await upload(
                self._store, self._place.object_key(key), source, _metadata_of(source.sha256)
            )
        except NotFound as error:
            found = await self._metadata(key)
            if found is None or found.get(SHA256) != source.sha256:
                raise TransientError(
                    f"the upload of {self._place.uri(key)} was aborted by another client; try again"
                ) from error

    async def _metadata(self, key: str) -> Mapping[str, str] | None:
        """The metadata of an object, or None where there is none."""
        try:
            answer = await self._store.call(self._head, where=self._at(key))
        except NotFound:
            return None
        return _names_lowered(answer)

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._place.bucket, "Key": self._place.object_key(key)}

    def _get_verified(self, where: Mapping[str, str]) -> bytes | None:
        """The content, or None when it does not match the hash that it carries. Objects of others carry
        none."""
        data, metadata = self._read(where)
        good = metadata.get(SHA256, "") in ("", _hash(data))
        return data if good else None

    def _read(self, where: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
        answer = self._client.get_object(**where)
        with answer["Body"] as body:
            require_fields(answer, "ContentLength")
            return body.read(), _names_lowered(answer)

    def _head(self, where: Mapping[str, str]) -> Mapping[str, Any]:
        return require_fields(self._client.head_object(**where), "ContentLength")

    def _page(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return require_fields(self._client.list_objects_v2(**arguments), "IsTruncated")


@asynccontextmanager
async def open_s3(
    uri: str, *, endpoint: str | None, public_endpoint: str | None
) -> AsyncIterator[S3Blobs]:
    """Open and check the blobs at `s3://bucket/prefix`. Clients reach the store at `public_endpoint`, or
    not at all. Raises InvalidConfig, TransientError."""
    store = S3Store(S3Place.parse(uri), endpoint=endpoint)
    direct = S3Direct(store, public_endpoint=public_endpoint)
    try:
        blobs = S3Blobs(store, direct=direct)
        await blobs.probe()
        yield blobs
    finally:
        direct.close()
        store.close()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _metadata_of(sha256: str) -> dict[str, str]:
    """The metadata of an object: the hash of its content, and the id of the write that made it."""
    return {SHA256: sha256, PUT: uuid4().hex}


def _names_lowered(answer: Mapping[str, Any]) -> Mapping[str, str]:
    """The metadata of an answer; some stores change the case of its names."""
    return {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
