"""Uploads of datasets in stages: announced, sent in parts, and checked after the last part.

A control process claims an upload while it checks it, and renews its claim. If that process dies,
another one claims the upload, and what the first one would still write has an older number of attempts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from asyncpg import UniqueViolationError

from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict

SQL = queries("infra/blobs/staged_uploads.sql")

CLAIM_S = 15.0
"""How long a claim holds without being renewed."""

MAX_ERROR = 2000


class NameTaken(Conflict):
    """The name of an upload belongs to a dataset with other content, or to another upload that is
    checked now. `holder` is its id; None when the sender of the request may not see it."""

    def __init__(self, message: str, *, holder: str | None) -> None:
        super().__init__(message)
        self.holder = holder


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """An upload of a dataset. `series` is the id of the dataset's first version, and `dataset` that of
    the version that the upload became. `mapping` and `issues` are JSON text. `attempts` counts the
    claims."""

    id: str
    name: str
    file_name: str
    file_size: int
    overwrites: bool
    mapping: str
    sha256: str | None
    series: str
    dataset: str | None
    error: str | None
    issues: str | None
    attempts: int
    workspace: str | None
    organisation: str | None
    created_at: datetime
    status: str

    @property
    def has_ended(self) -> bool:
        return self.status in ("uploaded", "error", "cancelled")


@dataclass(frozen=True, slots=True)
class UploadLine:
    """A line of the log of an upload. Lines count from 1."""

    line: int
    at: datetime
    level: str
    step: str
    message: str


class StagedUploads:
    """The table of uploads, as far as they are uploads in stages."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def add(
        self,
        upload: str,
        *,
        name: str,
        file_name: str,
        file_size: int,
        overwrites: bool,
        mapping: str,
        sha256: str | None,
        series: str,
        workspace: str | None,
        organisation: str | None,
    ) -> StagedUpload:
        row = await self._pool.fetchrow(
            SQL["add"],
            upload,
            name,
            file_name,
            file_size,
            overwrites,
            mapping,
            sha256,
            series,
            workspace,
            organisation,
        )
        return StagedUpload(**row)

    async def find(self, upload: str) -> StagedUpload | None:
        return _upload_in(await self._pool.fetchrow(SQL["find"], upload))

    async def find_named(
        self, name: str, *, workspaces: Sequence[str] | None, organisation: str | None
    ) -> str | None:
        """The id of the newest upload of this name that was not aborted, in these workspaces or shared
        by an organisation (its id). Without `workspaces`, it is searched everywhere."""
        found: str | None = await self._pool.fetchval(
            SQL["find_named"], name, workspaces, organisation
        )
        return found

    async def find_unfinished(
        self,
        *,
        file_name: str,
        file_size: int,
        overwrites: bool,
        mapping: str,
        sha256: str,
        series: str,
    ) -> StagedUpload | None:
        """The newest upload of the same file to the same name that still waits for parts."""
        row = await self._pool.fetchrow(
            SQL["find_unfinished"],
            series,
            sha256,
            file_size,
            overwrites,
            mapping,
            file_name,
        )
        return _upload_in(row)

    async def begin_check(self, upload: StagedUpload) -> StagedUpload | None:
        """Let an upload be checked. Returns None when it does not wait for its parts any more. Raises
        Conflict while another upload of the same new name is checked."""
        try:
            return _upload_in(await self._pool.fetchrow(SQL["begin_check"], upload.id))
        except UniqueViolationError as error:
            other = await self._pool.fetchval(SQL["find_processing"], upload.series, upload.id)
            raise NameTaken(
                f"another upload of dataset {upload.name} is being checked ({other}); wait for it, or "
                "choose another name",
                holder=other,
            ) from error

    async def claim(self) -> StagedUpload | None:
        """Claim an upload that is to be checked, for CLAIM_S."""
        return _upload_in(await self._pool.fetchrow(SQL["claim"], CLAIM_S))

    async def renew(self, upload: StagedUpload) -> bool:
        """Renew a claim. Returns False when it was lost."""
        found = await self._pool.fetchval(SQL["renew"], upload.id, upload.attempts, CLAIM_S)
        return found is not None

    async def release(self, upload: StagedUpload, *, for_s: float) -> None:
        """Give a claim back. The upload is claimed again after `for_s`, and this attempt is not
        counted."""
        await self._pool.execute(SQL["release"], upload.id, upload.attempts, for_s)

    async def finish(
        self,
        upload: StagedUpload,
        status: str,
        *,
        dataset: str | None = None,
        error: str | None = None,
        issues: str | None = None,
        uploader: str | None = None,
    ) -> bool:
        """Record how a claimed upload ended. Returns False when the claim was lost."""
        shown = None if error is None else error.replace("\0", "\N{REPLACEMENT CHARACTER}")
        found = await self._pool.fetchval(
            SQL["finish"],
            upload.id,
            upload.attempts,
            status,
            dataset,
            shown and shown[:MAX_ERROR],
            issues,
            uploader,
        )
        return found is not None

    async def cancel(self, upload: str) -> bool:
        """Cancel an upload that waits for its parts. Returns False for another one."""
        return await self._pool.fetchval(SQL["cancel"], upload) is not None

    async def cancel_abandoned(self) -> int:
        """Cancel the uploads whose parts are not expected any more. Returns how many were."""
        return len(await self._pool.fetch(SQL["cancel_abandoned"]))

    async def add_lines(self, upload: str, lines: Sequence[tuple[str, str, str]]) -> None:
        """Add lines (level, step, message) to the log of an upload."""
        levels, steps, messages = zip(*lines, strict=True)
        clean = [m.replace("\0", "\N{REPLACEMENT CHARACTER}")[:MAX_ERROR] for m in messages]
        await self._pool.execute(SQL["add_lines"], upload, list(levels), list(steps), clean)

    async def lines(self, upload: str, *, limit: int, before: int | None) -> list[UploadLine]:
        """The newest `limit` lines of the log of an upload before a line, the oldest first."""
        rows = await self._pool.fetch(SQL["lines"], upload, before, limit)
        return [UploadLine(**row) for row in reversed(rows)]

    async def upload_of(self, dataset: str) -> str | None:
        """The upload that became this dataset, if it was an upload in stages."""
        found: str | None = await self._pool.fetchval(SQL["upload_of_dataset"], dataset)
        return found


def _upload_in(row: Any) -> StagedUpload | None:
    return None if row is None else StagedUpload(**row)
