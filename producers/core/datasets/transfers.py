"""Bytes in and out by signed URLs: what a client sends, and where it reads.

The URLs are those of this server, or those of an S3 store that clients reach. They need no API key in a
header, so the programs that copy the bytes never see one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import uuid4

from infra.blobs.installed import InstalledBlobs
from infra.blobs.uploads import Upload, UploadStore, check_size
from infra.identity.quotas import Quotas
from infra.identity.signed_urls import SignedUrls
from infra.ports.actor import (
    MAIN,
    Actor,
    acting,
    key_workspace,
    may_see,
    may_use_dataset,
    own_organisation,
)
from infra.ports.actor import (
    ROOT as ROOT_KEY,
)
from schemas.errors import Conflict, NotFound
from schemas.events import DatasetRegistered
from schemas.ids import short_id

ROOT = "/api/v1/transfers"
UPLOAD_S = 12 * 3600.0
DOWNLOAD_S = 3600.0
"""How long the URLs of an upload and of a download are valid."""

DIRECT_UPLOAD_S = 3600
DIRECT_BYTES_PER_S = 1 << 20
DIRECT_DOWNLOAD_S = 900
"""The same for URLs of the store, which do not end with the API key. Those of an upload are valid for at
least this long, and as long as it takes at this speed."""


@dataclass(frozen=True, slots=True)
class PartUrl:
    """Where to PUT a part, how many bytes it has, and its ETag if it has arrived already."""

    number: int
    size: int
    url: str
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """How to send a file: each part with PUT. A file with one part is sent as a whole."""

    upload: str
    size: int
    part_size: int
    parts: tuple[PartUrl, ...]
    expires_in: int = int(UPLOAD_S)

    @property
    def is_multipart(self) -> bool:
        return len(self.parts) > 1


@dataclass(frozen=True, slots=True)
class DownloadUrl:
    """Where to GET a file, and under which name to save it."""

    url: str
    file_name: str
    expires_in: int = int(DOWNLOAD_S)


class Transfers:
    """Begins uploads, and makes the URLs of uploads and downloads."""

    def __init__(
        self,
        uploads: UploadStore,
        signed_urls: SignedUrls,
        quotas: Quotas,
        *,
        blobs: InstalledBlobs,
        public_url: str,
    ) -> None:
        self.uploads = uploads
        self._quotas = quotas
        self._blobs = blobs
        self._signed_urls = signed_urls
        self._public_url = public_url.rstrip("/")

    async def begin(self, purpose: str, size: int) -> Upload:
        """Expect a file of `size` bytes from the sender of the request. Raises InvalidConfig when it is
        empty or too large, and QuotaExceeded when its bytes are more than may be stored, where they
        count until the upload ends. Bytes that go straight to the store count as received now."""
        actor, upload = acting(), short_id("upload", uuid4().hex)
        check_size(size)
        async with self._quotas.room_for_bytes(size, upload=upload):
            if self.uploads.sends_direct and actor is not None:
                await self._quotas.take_bytes(actor, size)
            return await self.uploads.begin(
                upload,
                purpose,
                size,
                actor=pack_actor(actor),
                workspace=key_workspace(),
                organisation=None if own_organisation() == MAIN else own_organisation(),
            )

    async def find_unfinished(self, purpose: str, size: int) -> Upload | None:
        """An upload of the sender of the request, for this purpose and of this size, that can go on."""
        return await self.uploads.find_unfinished(
            purpose,
            size,
            workspace=key_workspace(),
            organisation=None if own_organisation() == MAIN else own_organisation(),
        )

    async def find(self, upload: str) -> Upload:
        """An upload that the sender of the request may see. Raises NotFound."""
        found = await self.uploads.find(upload)
        if not may_send(found.workspace, found.organisation):
            raise NotFound(f"there is no upload {upload[:80]}; begin another one")
        return found

    async def plan(self, upload: Upload, *, address: str | None = None) -> UploadPlan:
        """How to send the rest of an upload. `address` is the one at which the client reached this
        server. Raises Conflict when no parts are expected any more."""
        if upload.status != "open":
            raise Conflict(f"upload {upload.id} expects no parts any more; begin another one")
        arrived = await self.uploads.admit(upload)
        direct_s = max(DIRECT_UPLOAD_S, upload.size // DIRECT_BYTES_PER_S)
        direct = await self.uploads.direct_urls(upload, for_s=direct_s)
        urls = []
        for number in range(1, upload.num_parts + 1):
            size, part = upload.bytes_of(number), arrived.get(number)
            if direct is not None:
                url = direct[number - 1]
            else:
                path = f"{ROOT}/uploads/{upload.id}/{number}"
                url = await self._url("PUT", path, for_s=UPLOAD_S, length=size, address=address)
            urls.append(PartUrl(number, size, url, part.etag if part else None))
        expires_in = int(UPLOAD_S) if direct is None else direct_s
        return UploadPlan(upload.id, upload.size, upload.part_size, tuple(urls), expires_in)

    async def download_url(
        self, path: str, file_name: str, *, address: str | None = None
    ) -> DownloadUrl:
        """A URL by which `path` (below `ROOT`) can be read."""
        url = await self._url("GET", ROOT + path, for_s=DOWNLOAD_S, address=address)
        return DownloadUrl(url, file_name)

    async def dataset_url(
        self, registered: DatasetRegistered, *, address: str | None = None
    ) -> DownloadUrl:
        """A URL by which the file of a dataset can be read as it was uploaded."""
        file_name, direct = registered.file_name, self._blobs.direct
        if direct is not None and direct.is_public:
            uri = await self._blobs.current_uri(registered.original.uri)
            url = await direct.get_url(uri, file_name=file_name, for_s=DIRECT_DOWNLOAD_S)
            if url is not None:
                return DownloadUrl(url, file_name, DIRECT_DOWNLOAD_S)
        path = f"/datasets/{registered.dataset.dataset}"
        return await self.download_url(path, file_name, address=address)

    async def join(self, upload: Upload, named: Sequence[tuple[int, str]] | None) -> Upload:
        """Complete an upload. Raises InvalidConfig when parts are missing or differ, and Conflict when
        it was aborted."""
        await self.uploads.join(upload, named)
        return await self.uploads.find(upload.id)

    async def _url(
        self,
        method: str,
        path: str,
        *,
        for_s: float,
        address: str | None,
        length: int | None = None,
    ) -> str:
        actor = acting()
        signed = await self._signed_urls.sign(
            method,
            path,
            api_key=actor.api_key if actor else ROOT_KEY,
            for_s=for_s,
            length=length,
            ends_at=actor.expires_at if actor else None,
        )
        return (address or self._public_url).rstrip("/") + signed


def may_send(workspace: str | None, organisation: str | None) -> bool:
    """Whether this task may send to an upload, or end it. One of a whole organisation belongs to the
    API keys that are not bound to a workspace."""
    if workspace is not None:
        return may_see(workspace)
    return key_workspace() is None and may_use_dataset(None, organisation)


def pack_actor(actor: Actor | None) -> str:
    """An actor as JSON text, for work that is done for it later."""
    if actor is None:
        return "{}"
    values = {field.name: getattr(actor, field.name) for field in fields(actor)}
    return json.dumps(
        {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in values.items()
            if not isinstance(value, datetime)
        }
    )


def unpack_actor(text: str) -> Actor | None:
    """The actor that `pack_actor` packed. It has no time at which its secret expires, because what it
    asked for was accepted before."""
    values = json.loads(text)
    known = {field.name for field in fields(Actor)}
    given: dict[str, Any] = {
        name: frozenset(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in known
    }
    return Actor(**given) if given else None
