"""Uploads of datasets in stages: begin, send the parts, complete. After that the file is checked in the
background, and its log says what was found.

Whatever control process has time checks it. If that one dies, another one or its next start checks the
file again. Nothing is registered twice, because a registration is the same for the same content.
"""

import asyncio
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context
from functools import partial
from pathlib import Path

from infra import failpoints
from infra.blobs.staged_uploads import CLAIM_S, StagedUpload, StagedUploads, UploadLine
from infra.blobs.uploads import Upload
from infra.names import Names
from infra.ports.actor import acting, acting_as, visible_organisation, visible_workspaces
from infra.ports.services import Blobs
from infra.spine.ports.clock import Clock
from infra.spine.ports.event_log import EventStore
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from producers.core.datasets import registration
from producers.core.datasets.row_issues import RowIssue, to_text
from producers.core.datasets.transfers import Transfers, UploadPlan, may_send, unpack_actor
from producers.core.datasets.versions import load_versions, name_of_version
from schemas.errors import Conflict, HeadraceError, NotFound, Refused, TransientError
from schemas.events import DatasetRegistered

logger = logging.getLogger(__name__)

PURPOSE = "dataset"
AWAY: tuple[type[Exception], ...] = (HeadraceError, OSError, TimeoutError, *UNAVAILABLE_ERRORS)
"""Errors of what is outside of a check. The check is tried again."""

MAX_ATTEMPTS = 5
"""An upload whose check ended the server so often is refused."""

AGAIN_S = 5.0
"""When an upload is checked again, after something outside did not answer."""

EVERY_S = 15.0
COLLECT_EVERY_S = 3600.0
"""How often the server looks for uploads to check that another process left, and for abandoned ones."""

AT_ONCE = 2
"""How many files a process checks at the same time."""


class DatasetUploads:
    """Begins, completes and aborts uploads of datasets, and checks their files."""

    def __init__(
        self,
        log: EventStore,
        transfers: Transfers,
        staged: StagedUploads,
        *,
        blobs: Blobs,
        names: Names,
        scratch: Path,
        clock: Clock,
    ) -> None:
        self._log = log
        self._transfers = transfers
        self._staged = staged
        self._blobs = blobs
        self._names = names
        self._scratch = scratch
        self._clock = clock
        self._workers: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        name: str,
        file_name: str,
        file_size: int,
        *,
        overwrites: bool = False,
        sha256: str | None = None,
        mapping: Mapping[str, str] | None = None,
    ) -> StagedUpload | DatasetRegistered:
        """Expect a file. With its `sha256`, an upload of the same file that was interrupted goes on,
        and a file that the newest version has already is that version. Raises InvalidConfig, and
        Conflict when the name is used and the upload does not overwrite."""
        registration.check_name(name)
        registration.file_kind(file_name)
        series = (await registration.dataset_key(self._names, name)).id
        newest = (await load_versions(self._log, series)).newest
        if newest is not None:
            event = newest.event
            if not registration.may_use(event):
                raise registration.used_name(name)
            is_same = sha256 == event.original.sha256 and dict(mapping or {}) == event.mapping
            if is_same:
                return event
            if not overwrites:
                raise registration.existing_dataset(newest)
        mapped = json.dumps(dict(mapping or {}), sort_keys=True)
        if sha256 is not None:
            found = await self._staged.find_unfinished(
                file_name=file_name,
                file_size=file_size,
                overwrites=overwrites,
                mapping=mapped,
                sha256=sha256,
                series=series,
            )
            if found is not None:
                return found
        upload = await self._transfers.begin(PURPOSE, file_size)
        added = await self._staged.add(
            upload.id,
            name=name,
            file_name=file_name,
            file_size=file_size,
            overwrites=overwrites,
            mapping=mapped,
            sha256=sha256,
            series=series,
            workspace=upload.workspace,
            organisation=upload.organisation,
        )
        parts = f"{upload.num_parts} parts" if upload.num_parts > 1 else "one part"
        await self._note(upload.id, "upload", f"{file_name} of {file_size} bytes, in {parts}")
        return added

    async def find(self, upload: str) -> StagedUpload:
        """An upload that the sender of the request may see. Raises NotFound."""
        found = await self._staged.find(upload)
        if found is None or not may_send(found.workspace, found.organisation):
            raise NotFound(f"there is no upload {upload[:80]}; begin another one")
        return found

    async def plan(self, upload: str, *, address: str | None = None) -> UploadPlan:
        """How to send the parts of an upload that have not arrived. Raises NotFound, Conflict."""
        await self.find(upload)
        return await self._transfers.plan(await self._transfers.find(upload), address=address)

    async def complete(
        self, upload: str, parts: Sequence[tuple[int, str]] | None = None
    ) -> StagedUpload:
        """Let an upload be checked whose parts have all arrived. `parts` are their numbers and ETags;
        None names those that have arrived. Doing so again changes nothing. Raises NotFound;
        InvalidConfig when parts are missing or differ; and Conflict when the upload was aborted, or
        its name has become that of another dataset."""
        found = await self.find(upload)
        if found.status == "cancelled":
            raise Conflict(f"upload {upload} was aborted; begin another one")
        if found.status not in ("pending", "uploading"):
            return found
        newest = (await load_versions(self._log, found.series)).newest
        if (
            newest is not None
            and not found.overwrites
            and not self._is_file_of(found, newest.event)
        ):
            raise registration.existing_dataset(newest)
        await self._transfers.join(await self._transfers.find(upload), parts)
        failpoints.hit("upload.joined")
        begun = await self._staged.begin_check(found)
        if begun is not None:
            await self._note(upload, "upload", f"all {found.file_size} bytes have arrived")
        self.wake()
        return begun or await self.find(upload)

    async def abort(self, upload: str) -> StagedUpload:
        """End an upload that is not complete, and delete its parts. Raises NotFound, and Conflict when
        it is complete."""
        found = await self.find(upload)
        if await self._staged.cancel(upload):
            await self._note(upload, "upload", "the upload was aborted")
            await self._transfers.uploads.close(upload)
        elif found.status not in ("cancelled", "error"):
            raise Conflict(
                f"upload {upload} is {found.status} and cannot be aborted; `headrace dataset delete` "
                "deletes a dataset"
            )
        return await self.find(upload)

    async def find_id(self, ref: str) -> str:
        """The id of an upload, of the newest upload of this name, or of a dataset by its name or id.
        Raises NotFound."""
        try:
            return (await self.find(ref)).id
        except NotFound:
            named = await self._staged.find_named(
                ref, workspaces=visible_workspaces(), organisation=visible_organisation()
            )
            return named or (await registration.find(self._log, self._names, ref)).dataset.dataset

    async def lines(self, upload: str, *, limit: int, before: int | None) -> list[UploadLine]:
        """The newest lines of the log of an upload, or of the upload that became a dataset, before a
        line. The oldest of them comes first."""
        own = await self._staged.upload_of(upload) or upload
        return await self._staged.lines(own, limit=limit, before=before)

    def wake(self) -> None:
        """Check the files that wait, in the background."""
        if len(self._workers) < AT_ONCE:
            # Not on behalf of the request that wakes it: the files are those of all organisations.
            worker = asyncio.create_task(self._check_all(), context=Context())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def run(self) -> None:
        """Check what other processes left, and collect what nobody finished, until cancelled."""
        collected_at = float("-inf")
        try:
            while True:
                self.wake()
                if self._clock.elapsed_s() - collected_at >= COLLECT_EVERY_S:
                    collected_at = self._clock.elapsed_s()
                    await self._collect()
                await self._clock.sleep(EVERY_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop checking. Files that are being checked are checked by another process."""
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers)

    async def _collect(self) -> None:
        try:
            await self._transfers.uploads.collect()
            await self._staged.cancel_abandoned()
        except AWAY as error:
            logger.warning("abandoned uploads are collected later: %s", error)

    async def _check_all(self) -> None:
        try:
            while (upload := await self._staged.claim()) is not None:
                await self._check_claimed(upload)
        except UNAVAILABLE_ERRORS as error:
            logger.warning("uploads are checked later: %s", error)

    async def _check_claimed(self, upload: StagedUpload) -> None:
        """Check a file under its claim, and record how it ended."""
        renewing = asyncio.create_task(self._renew(upload, asyncio.current_task()))
        try:
            whole = await self._transfers.uploads.find(upload.id)
            actor = unpack_actor(whole.actor)
            with nullcontext() if actor is None else acting_as(actor):
                await self._check_or_refuse(upload, whole)
        except AWAY as error:
            logger.warning("upload %s is checked again later: %s", upload.id, error)
            with suppress(*UNAVAILABLE_ERRORS):
                await self._staged.release(upload, for_s=AGAIN_S)
        finally:
            renewing.cancel()

    async def _check_or_refuse(self, upload: StagedUpload, whole: Upload) -> None:
        """Check a file on behalf of its sender. An error that nobody expected refuses it."""
        try:
            await self._check(upload, whole)
        except AWAY:
            raise
        except Exception as error:
            logger.exception("upload %s could not be checked", upload.id)
            await self._refuse(upload, f"the check failed: {type(error).__name__}; upload it again")

    async def _renew(self, upload: StagedUpload, checking: "asyncio.Task[None] | None") -> None:
        """Renew a claim, and stop the check when it was lost."""
        while True:
            await asyncio.sleep(CLAIM_S / 3)
            with suppress(*UNAVAILABLE_ERRORS):
                if not await self._staged.renew(upload) and checking is not None:
                    checking.cancel()
                    return

    async def _check(self, upload: StagedUpload, whole: Upload) -> None:
        if upload.attempts > MAX_ATTEMPTS:
            await self._refuse(
                upload,
                f"the check ended the server {MAX_ATTEMPTS} times; split the file or simplify it",
            )
            return
        failpoints.hit("upload.claimed")
        issues: Sequence[RowIssue] = ()
        try:
            await self._note(upload.id, "check", "the check has begun")
            async with self._file_of(whole) as (path, out):
                kind = registration.file_kind(upload.file_name)
                mapping = json.loads(upload.mapping)
                checked = await registration.check(path, kind, mapping=mapping, out=out)
                issues = checked.report.issues
                recorded = await registration.register(
                    checked,
                    path,
                    name=upload.name,
                    file_name=upload.file_name,
                    log=self._log,
                    blobs=self._blobs,
                    names=self._names,
                    mapping=mapping,
                    overwrites=upload.overwrites,
                    sha256=upload.sha256,
                    is_wanted=partial(self._staged.renew, upload),
                )
        except registration.UploadDropped:
            if await self._staged.find(upload.id) is None:
                await self._transfers.uploads.close(upload.id)
            return
        except Refused as refusal:
            await self._refuse(upload, refusal.message, issues)
            return
        failpoints.hit("upload.registered")
        await self._accept(upload, recorded.event)

    async def _accept(self, upload: StagedUpload, event: object) -> None:
        if not isinstance(event, DatasetRegistered):
            raise TransientError(f"upload {upload.id} has no event")
        ref = event.dataset
        said = f"{ref.num_rows} rows are stored as {name_of_version(ref.name, ref.version)}"
        if await self._staged.finish(upload, "uploaded", dataset=ref.dataset):
            await self._note(upload.id, "store", said)
            await self._transfers.uploads.close(upload.id)

    async def _refuse(
        self, upload: StagedUpload, message: str, issues: Sequence[RowIssue] = ()
    ) -> None:
        actor = acting()
        ended = await self._staged.finish(
            upload,
            "error",
            error=message,
            issues=to_text(issues),
            uploader=actor.owner if actor is not None else None,
        )
        if ended:
            texts = [f"{one.key} {one.message}" for one in (i.for_text() for i in issues)]
            lines = [("error", "check", text) for text in texts or [message]]
            await self._staged.add_lines(upload.id, lines)
            await self._transfers.uploads.close(upload.id)

    @asynccontextmanager
    async def _file_of(self, upload: Upload) -> AsyncIterator[tuple[Path, Path]]:
        """A complete upload as one file, and a path for its rows. Both are deleted afterwards."""
        await asyncio.to_thread(self._scratch.mkdir, mode=0o700, parents=True, exist_ok=True)
        directory = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._scratch))
        try:
            path = directory / "file"
            with path.open("wb") as file:
                async for piece in self._transfers.uploads.chunks(upload):
                    await asyncio.to_thread(file.write, piece)
            yield path, directory / "rows"
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))

    async def _note(self, upload: str, step: str, message: str) -> None:
        await self._staged.add_lines(upload, [("info", step, message)])

    def _is_file_of(self, upload: StagedUpload, event: DatasetRegistered) -> bool:
        """Whether an upload may hold the content that a dataset has: its file has the same size."""
        same_sha256 = upload.sha256 in (None, event.original.sha256)
        return same_sha256 and upload.file_size == event.file_size
