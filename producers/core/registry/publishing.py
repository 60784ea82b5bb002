"""Publishes versions of capabilities, tasks and models, finds and withdraws them.

An organisation has one artifact of a kind and a name. A version of it is immutable: its id follows from
the organisation, the kind, the name and the version, and so does the cause of its event. Of two that are
published at the same time with different content one is recorded, and the other one is refused.

The bytes arrive before, as an upload in parts. A publication that is repeated, because the server died
or its answer was lost, publishes the same version.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from uuid import UUID

from infra import failpoints
from infra.blobs.installed import InstalledBlobs
from infra.blobs.uploads import Upload
from infra.operations.maintenance.archive import Archives, Moved
from infra.ports.actor import acting
from infra.readmodel.store import ReadModel
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from producers.core.datasets.transfers import Transfers, UploadPlan
from producers.core.registry.confined_check import CPU_S, ArchiveReport
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, TransientError
from schemas.events import ArtifactPublished, ArtifactWithdrawn
from schemas.ids import (
    HEADRACE,
    ArtifactKind,
    SemanticVersion,
    artifact_stream,
    derive_id,
    is_id,
    short_id,
)

LISTED_WITHIN_S = 10.0
"""How long a version that is published already may take until lists have it."""

PURPOSE = "artifact"
FOLDER = "registry/"
"""How the keys of the blobs begin. Each belongs to one version, so that an event that names it uses
this version."""

MAX_ARCHIVE: dict[ArtifactKind, int] = {"capability": 1 << 30, "task": 1 << 30, "model": 5 << 30}
"""Bytes of an archive, by kind."""

NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?")
LATEST = "latest"
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """Identifies a version of an artifact. `organisation` is an id."""

    organisation: str
    kind: ArtifactKind
    name: str
    version: SemanticVersion

    @property
    def id(self) -> str:
        text = f"{self.organisation}/{self.kind}/{self.name}/{self.version}"
        return short_id("artifact", text)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class PublishedArtifact:
    """A published version: its event, and where the event is in the log."""

    event: ArtifactPublished
    recorded: Recorded


def archive_name(event: ArtifactPublished) -> str:
    """The file name under which the archive of a version is saved."""
    return f"{event.artifact_name}-{event.semver}.tar.gz"


def artifact_kind(text: str) -> ArtifactKind:
    """The kind that this text names. Raises InvalidConfig."""
    for kind in get_args(ArtifactKind):
        if text == kind:
            known: ArtifactKind = kind
            return known
    message = f"must be capability, task or model, got {text[:40]!r}"
    raise InvalidConfig(f"kind {message}", issues=(Issue("kind", message),))


def artifact_key(organisation: str, kind: str, name: str, version: str) -> ArtifactKey:
    """The key of a version. Raises InvalidConfig when the kind, the name or the version is not one."""
    known = artifact_kind(kind)
    if not NAME.fullmatch(name) or ".." in name or is_id(name):
        message = (
            "must have lower-case letters, digits, '.', '_' and '-', at most 128, begin and end with a "
            f"letter or digit, and not look like an id, got {name[:140]!r}"
        )
        raise InvalidConfig(f"name {message}", issues=(Issue("name", message),))
    return ArtifactKey(organisation, known, name, SemanticVersion.parse(version))


class ArtifactRegistry:
    """Publishes, finds and withdraws versions of artifacts."""

    def __init__(
        self,
        log: EventStore,
        transfers: Transfers,
        readmodel: ReadModel,
        *,
        blobs: InstalledBlobs,
        archives: Archives,
        scratch: Path,
    ) -> None:
        self._log = log
        self._transfers = transfers
        self._tables = readmodel
        self._blobs = blobs
        self._archives = archives
        self._scratch = scratch

    async def begin(self, key: ArtifactKey, size: int, sha256: str) -> PublishedArtifact | Upload:
        """Expect the archive of a version, which has this size and SHA-256. Returns the version when it
        is published with the same archive already. An upload of the same archive that was interrupted
        goes on. Raises InvalidConfig, and Conflict when the version has other content."""
        most = MAX_ARCHIVE[key.kind]
        if size > most:
            message = f"must be at most {most >> 30} GiB for a {key.kind}, got {size} bytes"
            raise InvalidConfig(f"file_size {message}", issues=(Issue("file_size", message),))
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            message = f"must be 64 hex digits, got {sha256[:80]!r}"
            raise InvalidConfig(f"sha256 {message}", issues=(Issue("sha256", message),))
        existing = await self._existing(key, sha256)
        if existing is not None:
            return existing
        purpose = f"{PURPOSE}/{key.id}/{sha256}"
        return await self._transfers.find_unfinished(purpose, size) or await self._transfers.begin(
            purpose, size
        )

    async def plan(self, upload: Upload, *, address: str | None = None) -> UploadPlan:
        """How to send the parts of an upload that have not arrived. All have when it is complete."""
        if upload.status == "complete":
            return UploadPlan(upload.id, upload.size, upload.part_size, ())
        return await self._transfers.plan(upload, address=address)

    async def publish(
        self, key: ArtifactKey, upload: str, parts: Sequence[tuple[int, str]] | None = None
    ) -> PublishedArtifact:
        """Publish a version from an upload whose parts have all arrived (`parts`: their numbers and
        ETags; None: those that have arrived). The same archive again is the same version. Raises
        NotFound; InvalidConfig when parts are missing, or with the issues of the archive; and Conflict
        when the version has other content."""
        found = await self._find_upload(key, upload)
        if found.status == "closed" and (done := await self._existing(key, _sha256_of(found))):
            return done  # the answer to the request that published it was lost
        whole = await self._transfers.join(found, parts)
        failpoints.hit("artifact.joined")
        async with self._file_of(whole) as (path, detail):
            sha256, size = await asyncio.to_thread(_digest, path)
            if sha256 != _sha256_of(found):
                message = f"has the SHA-256 {sha256}, and {_sha256_of(found)} was announced"
                await self._transfers.uploads.close(upload)
                raise InvalidConfig(
                    f"the archive {message}; send it again", issues=(Issue("sha256", message),)
                )
            published = await self._existing(key, sha256)
            if published is None:
                report = await check(path, key, out=detail)
                if report.issues:
                    await self._transfers.uploads.close(upload)
                    first = report.issues[0]
                    raise InvalidConfig(
                        f"{key} cannot be published: {first.key} {first.message}",
                        issues=report.issues,
                    )
                failpoints.hit("artifact.checked")
                content = ArtifactRef(uri="", sha256=sha256, size=size)
                published = await self._record(key, content, report, path, detail)
        # Its bytes count for the organisation, now as a version and until now as an upload.
        await self._tables.caught_up(published.recorded.cursor)
        await self._transfers.uploads.close(upload)
        return published

    async def _record(
        self,
        key: ArtifactKey,
        content: ArtifactRef,
        report: ArchiveReport,
        path: Path,
        detail: Path,
    ) -> PublishedArtifact:
        """Store the bytes and append the event. What was stored and is not named by an event, because
        the server died or somebody else was faster, is collected like a withdrawn version."""
        detail_sha256, detail_size = await asyncio.to_thread(_digest, detail)
        keys = [
            f"{FOLDER}{key.id}/{sha256}"
            for sha256 in dict.fromkeys((content.sha256, detail_sha256))
        ]
        for one in keys:
            await self._blobs.mark_unnamed(one)
        uri = await self._blobs.put_file(keys[0], path)
        detail_uri = await self._blobs.put_file(keys[-1], detail)
        failpoints.hit("artifact.stored")
        actor = acting()
        event = ArtifactPublished(
            artifact=key.id,
            organisation=key.organisation,
            kind=key.kind,
            artifact_name=key.name,
            semver=str(key.version),
            content=content.model_copy(update={"uri": uri}),
            detail=ArtifactRef(uri=detail_uri, sha256=detail_sha256, size=detail_size),
            num_files=report.num_files,
            unpacked_bytes=report.unpacked_bytes,
            summary=report.summary,
            published_by=actor.name if actor is not None else None,
        )
        await self._log.append([event], cause=await self._find_cause(key))
        failpoints.hit("artifact.published")
        published = await self._existing(key, content.sha256)
        if published is None:
            raise TransientError(f"{key} was withdrawn while it was published; publish it again")
        await self._blobs.mark_named([uri, detail_uri])
        return published

    async def find(self, organisation: str, kind: ArtifactKind, ref: str) -> PublishedArtifact:
        """A version by NAME@VERSION, or the latest one by NAME or NAME@latest: the highest release, or
        the highest pre-release while there is no release. Raises NotFound, InvalidConfig."""
        name, _, version = ref.partition("@")
        if version in ("", LATEST):
            newest = await self._tables.artifacts.latest(organisation, kind, name)
            if newest is None:
                raise NotFound(f"there is no {kind} {name[:140]!r}; {_how(kind)}")
            version = newest
        found = await self._find_published(artifact_key(organisation, kind, name, version))
        if found is not None:
            return found
        others = await self._tables.artifacts.versions(organisation, kind, name)
        if others:
            listed = ", ".join(row["version"] for row in others[:20])
            raise NotFound(f"{kind} {name} has no version {version}; it has {listed}")
        raise NotFound(f"there is no {kind} {name[:140]!r}; {_how(kind)}")

    async def find_id(self, artifact: str) -> ArtifactPublished | None:
        """A version by its id, in whatever organisation it is."""
        found = await self._last(artifact)
        return found.event if found and isinstance(found.event, ArtifactPublished) else None

    async def detail(self, event: ArtifactPublished) -> dict[str, object]:
        """The `manifest` and the `files` of a version. Raises NotFound, TransientError."""
        data = await self._blobs.get_blob(event.detail.uri)
        if hashlib.sha256(data).hexdigest() != event.detail.sha256:
            raise TransientError(
                f"the list of files of {event.full_name} is damaged; publish it again"
            )
        found: dict[str, object] = json.loads(data)
        return found

    async def withdraw(
        self, organisation: str, kind: ArtifactKind, ref: str
    ) -> tuple[ArtifactPublished, Cursor]:
        """Withdraw the version NAME@VERSION. Its bytes are collected later. Raises NotFound, Conflict
        while something uses it, and InvalidConfig when the version is not named."""
        if ref.partition("@")[2] in ("", LATEST):
            message = f"must name the version, like {ref.partition('@')[0][:128]}@1.0.0"
            raise InvalidConfig(f"ref {message}", issues=(Issue("ref", message),))
        found = await self.find(organisation, kind, ref)
        event = found.event
        notice = ArtifactWithdrawn(
            artifact=event.artifact,
            organisation=event.organisation,
            kind=event.kind,
            artifact_name=event.artifact_name,
            semver=event.semver,
            sha256=event.content.sha256,
        )
        uris = sorted({event.content.uri, event.detail.uri})
        cause = derive_id(found.recorded.id, "withdraw")
        try:
            cursor = await self._archives.remove_artifact(notice, uris, cause=cause)
        except Moved:
            cursor = Cursor()  # another request withdrew it meanwhile
        except Conflict as error:
            raise Conflict(f"{event.kind} {event.full_name} cannot be withdrawn: {error}") from None
        return event, cursor

    async def _find_upload(self, key: ArtifactKey, upload: str) -> Upload:
        found = await self._transfers.find(upload)
        if not found.purpose.startswith(f"{PURPOSE}/{key.id}/"):
            raise NotFound(f"upload {upload[:80]} is not one of {key}; begin another one")
        return found

    async def _existing(self, key: ArtifactKey, sha256: str) -> PublishedArtifact | None:
        """The version if it is published with this content, once lists have it: the process that
        published it may have died before they had. None when it may be published. Raises Conflict when
        it has, or had before it was withdrawn, other content."""
        last = await self._last(key.id)
        if last is None:
            return None
        event = last.event
        if isinstance(event, ArtifactPublished):
            if event.content.sha256 == sha256:
                await self._tables.caught_up(last.cursor, timeout_s=LISTED_WITHIN_S)
                return PublishedArtifact(event, last)
            raise _other_content(key, event.content.sha256, "is published")
        if isinstance(event, ArtifactWithdrawn) and event.sha256 != sha256:
            raise _other_content(key, event.sha256, "was published and withdrawn")
        return None

    async def _find_published(self, key: ArtifactKey) -> PublishedArtifact | None:
        last = await self._last(key.id)
        if last is None or not isinstance(last.event, ArtifactPublished):
            return None
        return PublishedArtifact(last.event, last)

    async def _last(self, artifact: str) -> Recorded | None:
        stream = artifact_stream(artifact)
        found = (await self._log.load({stream: 0}))[stream]
        return found[-1] if found else None

    async def _find_cause(self, key: ArtifactKey) -> UUID:
        """The cause of a publication. Each withdrawal of the version changes it."""
        last = await self._last(key.id)
        label = f"artifact/{key.id}"
        if last is not None and isinstance(last.event, ArtifactWithdrawn):
            label = f"{label}/{last.id}"
        return derive_id(HEADRACE, label)

    @asynccontextmanager
    async def _file_of(self, upload: Upload) -> AsyncIterator[tuple[Path, Path]]:
        """A complete upload as one file, and a path for its detail. Both are deleted afterwards."""
        await asyncio.to_thread(self._scratch.mkdir, mode=0o700, parents=True, exist_ok=True)
        directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._scratch))
        try:
            path = directory / "archive"
            with path.open("wb") as file:
                async for piece in self._transfers.uploads.chunks(upload):
                    await asyncio.to_thread(file.write, piece)
            yield path, directory / "detail"
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


async def check(path: Path, key: ArtifactKey, *, out: Path) -> ArchiveReport:
    """Check an archive in a confined process (`producers/core/registry/confined_check.py`). One that
    cannot be read within the limits is reported as an issue."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "producers.core.registry.confined_check",
        *(str(path), key.kind, key.name, str(key.version), str(out)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"},
    )
    try:
        async with asyncio.timeout(2 * CPU_S):
            printed, _ = await child.communicate()
    except TimeoutError:
        printed = b""
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        message = "cannot be read within the limits on memory and time; make it smaller"
        return ArchiveReport(issues=(Issue("archive", message),))
    found = json.loads(printed)
    issues = tuple(Issue(one["key"], one["message"]) for one in found["issues"])
    return ArchiveReport(found["num_files"], found["unpacked_bytes"], found["summary"], issues)


def _other_content(key: ArtifactKey, sha256: str, how: str) -> Conflict:
    return Conflict(
        f"{key} {how} with other content (sha256 {sha256[:12]}); versions are immutable, so raise the "
        "version"
    )


def _how(kind: ArtifactKind) -> str:
    return f"`headrace artifact push {kind} FOLDER` publishes one"


def _sha256_of(upload: Upload) -> str:
    """The SHA-256 with which the upload of an artifact was announced."""
    return upload.purpose.rpartition("/")[2]


def _digest(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
