"""Imports of evaluations that ran elsewhere: announce the files, send them, and finalize.

The workspace and the id of the local run identify the evaluation. The same content is the same import,
whatever is repeated, and other content replaces its results only on request. The results become events
in one commit, so an import is there as a whole or not at all.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infra import failpoints
from infra.blobs.evaluation_imports import ImportSession, ImportSessions, UploadOfFile
from infra.blobs.installed import InstalledBlobs
from infra.names import Names
from infra.ports.actor import acting, may_see
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import EventStore, Recorded
from producers.core.datasets import registration
from producers.core.datasets.transfers import Transfers, UploadPlan
from producers.core.datasets.versions import load_versions, split_version
from producers.core.evaluations.import_request import (
    INDEX,
    LOGS,
    OF_ATTEMPT,
    PROGRESS,
    ImportedFile,
    ImportRequest,
    refuse,
)
from producers.core.evaluations.imported_results import (
    LocalAttempt,
    check_progress,
    compute_figures,
    parse_index,
    record_of,
)
from producers.core.evaluations.trajectories import AtifTrajectory
from producers.core.run_names import require_name
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Conflict, NotFound, Refused, TransientError
from schemas.events import (
    MAX_EVENT_BYTES,
    EvaluationCompleted,
    EvaluationImported,
    EvaluationRowsImported,
    Event,
)
from schemas.events.evaluations import ImportedRow, LocalRun
from schemas.ids import HEADRACE, derive_id, eval_stream, short_id
from schemas.sampling import SampleBatch, SampleOutput, SampleRecord
from schemas.specs import DatasetRef

PURPOSE = "evaluation-import"
MOST_PATHS = 100
PAGE_BYTES = MAX_EVENT_BYTES - 4096
LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class ImportState:
    """An import: which of its files have arrived, and the evaluation once it is finalized."""

    session: ImportSession
    request: ImportRequest
    arrived: frozenset[str]
    imported: EvaluationImported | None = None


class EvaluationImports:
    """Imports evaluations that ran elsewhere."""

    def __init__(
        self,
        log: EventStore,
        transfers: Transfers,
        sessions: ImportSessions,
        *,
        blobs: InstalledBlobs,
        artifacts: Artifacts,
        names: Names,
    ) -> None:
        self._log = log
        self._transfers = transfers
        self._sessions = sessions
        self._blobs = blobs
        self._artifacts = artifacts
        self._names = names
        self._parsing = asyncio.Semaphore(1)  # a row becomes many times its size in memory

    async def begin(self, request: ImportRequest, *, workspace: str) -> ImportState:
        """Begin an import into a workspace (id), or go on with it. Raises InvalidConfig; NotFound when
        the dataset is not here; and Conflict when the run was imported with other content, unless the
        request replaces it."""
        require_name("evaluation", request.run.name)
        request.config()
        dataset = await self._dataset_of(request, workspace)
        request.selected_rows(dataset.num_rows)
        evaluation = short_id("imported-evaluation", f"{workspace}/{request.local_run_id}")
        newest = await self._newest(evaluation)
        content = request.content_sha256
        number = 1
        if newest is not None:
            is_same = newest.content_sha256 == content
            number = newest.number if is_same else newest.number + 1
            if not is_same:
                _check_replaces(request, newest)
        identity = short_id(PURPOSE, f"{evaluation}/{number}/{content}")
        await self._sessions.forget_old()
        await self._sessions.add(
            identity,
            evaluation=evaluation,
            number=number,
            workspace=workspace,
            content=request.model_dump_json(),
        )
        return await self.find(identity)

    async def find(self, identity: str) -> ImportState:
        """An import that the sender of the request may see. Raises NotFound."""
        session = await self._sessions.find(identity)
        if session is None or not may_see(session.workspace):
            raise NotFound(f"there is no import {identity[:80]}; begin it again")
        request = ImportRequest.model_validate_json(session.content)
        newest = await self._newest(session.evaluation)
        if newest is not None and _is_of(newest, session, request):
            everything = frozenset(one.path for one in request.files)
            return ImportState(session, request, everything, newest)
        uploads = await self._sessions.uploads(identity)
        return ImportState(session, request, frozenset(_find_arrived(request, uploads)))

    async def plan(
        self, identity: str, paths: Sequence[str], *, address: str | None = None
    ) -> list[tuple[ImportedFile, UploadPlan]]:
        """How to send those of these files that have not arrived. Raises NotFound, InvalidConfig,
        QuotaExceeded."""
        if not 1 <= len(paths) <= MOST_PATHS:
            raise refuse("paths", f"must be 1 to {MOST_PATHS}, got {len(paths)}")
        state = await self.find(identity)
        uploads = await self._sessions.uploads(identity)
        plans = []
        for path in dict.fromkeys(paths):
            file = _file(state.request, path, "paths")
            if path in state.arrived:
                continue
            held = uploads.get(path)
            if held is None or held.status != "open":
                upload = await self._transfers.begin(PURPOSE, file.size)
                await self._sessions.set_upload(identity, path, upload.id)
            else:
                upload = await self._transfers.find(held.upload)
            plans.append((file, await self._transfers.plan(upload, address=address)))
        return plans

    async def complete(
        self, identity: str, path: str, parts: Sequence[tuple[int, str]] | None
    ) -> None:
        """Complete the upload of a file. Doing so again changes nothing. Raises NotFound; and
        InvalidConfig when parts are missing, or when the file is not the one that was announced."""
        state = await self.find(identity)
        file = _file(state.request, path, "path")
        if path in state.arrived:
            return
        held = (await self._sessions.uploads(identity)).get(path)
        if held is None:
            raise Conflict(f"no upload of {path[:200]!r} was begun; ask for its URLs first")
        upload = await self._transfers.join(await self._transfers.find(held.upload), parts)
        digest = hashlib.sha256()
        async for piece in self._transfers.uploads.chunks(upload):
            digest.update(piece)
        if digest.hexdigest() != file.sha256:
            await self._sessions.drop_upload(identity, path)
            await self._transfers.uploads.close(upload.id)
            raise refuse(
                path, f"has the SHA-256 {digest.hexdigest()}, not {file.sha256}; send it again"
            )
        failpoints.hit("upload.import_file")

    async def finalize(self, identity: str) -> ImportState:
        """Import the results. Doing so again changes nothing. Raises NotFound; InvalidConfig when the
        files are not those of a finished run; Conflict when files are missing or other content was
        imported meanwhile; and TransientError while another import of the run is finalized."""
        state = await self.find(identity)
        if state.imported is None:
            missing = [one.path for one in state.request.files if one.path not in state.arrived]
            if missing:
                raise Conflict(
                    f"{len(missing)} files have not arrived, first {missing[0][:200]!r}; send them"
                )
            await self._import_once(identity)
        await self._close_uploads(state)
        return await self.find(identity)

    async def _import_once(self, identity: str) -> None:
        """Import the results, unless another request, perhaps in another process, does so meanwhile and
        deletes the parts: what is read then is cut off."""
        state = await self.find(identity)
        if state.imported is not None:
            return
        try:
            await self._import(state)
        except Refused:
            if (await self.find(identity)).imported is None:
                raise

    async def _import(self, state: ImportState) -> None:
        session, request = state.session, state.request
        dataset = await self._dataset_of(request, session.workspace)
        selected = request.selected_rows(dataset.num_rows)
        reader = _Files(self, state, await self._sessions.uploads(session.id))
        attempts = parse_index(await reader.read(INDEX), request, num_rows=len(selected))
        check_progress(
            await reader.read(PROGRESS), request, num_rows=len(selected), of=dataset.num_rows
        )
        rows: list[ImportedRow] = []
        for slot, row in enumerate(selected):
            async with self._parsing:  # row by row, so that a large import lets others pass
                rows.append(await self._store_row(reader, slot, row, attempts[slot]))
        failpoints.hit("upload.import_stored")
        name = await self._take_name(session, request)
        actor = acting()
        evaluation = request.run.evaluation_config
        figures = compute_figures(
            [row.grades for row in rows], n=evaluation.n, threshold=evaluation.pass_threshold
        )
        imported = EvaluationImported(
            evaluation=session.evaluation,
            number=session.number,
            eval_name=name,
            workspace=session.workspace,
            local_run=LocalRun(
                id=request.local_run_id,
                name=request.run.name,
                manifest_sha256=request.manifest_digest,
                code_digest=request.run.experiment_config.rollout.source_digest,
                provenance=request.provenance,
            ),
            content_sha256=request.content_sha256,
            dataset=dataset,
            config=request.config(),
            rows=len(selected),
            tokens=sum(one.tokens or 0 for row in attempts for one in row),
            started_at=request.run.started_at,
            logs=await reader.store(LOGS) if LOGS in reader.files else None,
            importer=actor.owner if actor is not None else None,
        )
        completed = EvaluationCompleted(
            evaluation=session.evaluation,
            status="finished",
            reward=figures.reward,
            metrics=dict(figures.metrics),
            ended_at=request.run.completed_at,
        )
        await self._append(session, request, [imported, *_pages(imported, rows), completed])

    async def _append(
        self, session: ImportSession, request: ImportRequest, events: Sequence[Event]
    ) -> None:
        if not await self._sessions.claim(session):
            raise TransientError("another import of this run is being finalized; try again")
        try:
            before = await self._events_of(session.evaluation)
            newest = _newest_in(before)
            if newest is not None and newest.number >= session.number:
                if _is_of(newest, session, request):
                    return
                raise _other_content(newest)
            # Two requests that finalize it have one cause. One that comes again after its deletion has
            # another, because the stream goes on.
            version = before[-1].version if before else 0
            key = f"evaluation-import/{session.id}/{version}"
            await self._log.append(events, cause=derive_id(HEADRACE, key))
            failpoints.hit("upload.import_appended")
        finally:
            await asyncio.shield(self._sessions.release(session))

    async def _store_row(
        self, reader: "_Files", slot: int, row: int, attempts: Sequence[LocalAttempt]
    ) -> ImportedRow:
        """Store the attempts at a row. Those that were skipped have no grade."""
        made = [one for one in attempts if one.status != "skipped"]
        records: list[SampleRecord] = []
        files: list[ArtifactRef] = []
        for index, attempt in enumerate(made):
            named = await reader.store_artifacts(attempt.rollout_id)
            output = SampleOutput(files=named) if named else None
            files += named.values()
            trajectory = await reader.trajectory(attempt)
            records.append(record_of(attempt, index, trajectory, output))
        group = f"{reader.evaluation}-evaluate-0-{slot}-{reader.number - 1}"
        batch = SampleBatch(group=group, samples=tuple(records)).model_dump_json().encode()
        found = ImportedRow(
            slot=slot,
            row=row,
            artifact=await self._artifacts.put_artifact(batch, run=reader.evaluation, blob=True),
            grades=tuple(one.grade(index) for index, one in enumerate(made)),
            attempts=tuple(one.run_index for one in made),
            files=tuple({ref.sha256: ref for ref in files}.values()),
        )
        if len(found.model_dump_json().encode()) > PAGE_BYTES:
            raise refuse(
                "files",
                f"must have fewer artifacts or runs at row {row}, because an event has at most "
                f"{PAGE_BYTES} bytes; pack the artifacts of an attempt into one file",
            )
        return found

    async def _take_name(self, session: ImportSession, request: ImportRequest) -> str:
        """The name of the evaluation: that of the local run, with a suffix if another one has it."""
        wanted, scope = request.run.name, session.workspace
        suffix = f"-{session.evaluation[:6]}"
        for name in (wanted, wanted[: LONGEST_NAME - len(suffix)] + suffix):
            held = await self._names.take("evaluation", name, session.evaluation, scope=scope)
            if held == session.evaluation:
                return name
        raise Conflict(f"the name {wanted} is already used; delete the other evaluation first")

    async def _close_uploads(self, state: ImportState) -> None:
        for held in (await self._sessions.uploads(state.session.id)).values():
            if held.status != "closed":
                await self._transfers.uploads.close(held.upload)

    async def _newest(self, evaluation: str) -> EvaluationImported | None:
        return _newest_in(await self._events_of(evaluation))

    async def _events_of(self, evaluation: str) -> Sequence[Recorded]:
        """The events of an evaluation. Its stream is read, which has also what is above the horizon."""
        stream = eval_stream(evaluation)
        return (await self._log.load({stream: 0}))[stream]

    async def _dataset_of(self, request: ImportRequest, workspace: str) -> DatasetRef:
        """The version of the dataset whose file the run evaluated. Raises InvalidConfig, NotFound."""
        wanted = request.run.experiment_config.dataset
        key = "run.experiment_config.dataset"
        try:
            found = await registration.find(
                self._log, self._names, wanted.name, workspace=workspace
            )
        except NotFound as error:
            message = f"names {wanted.name!r}, which is not here; upload its file first"
            raise refuse(f"{key}.name", message) from error
        name, _ = split_version(found.dataset.name)
        versions = await load_versions(self._log, found.series or found.dataset.dataset)
        for one in reversed(versions.found):
            if one.event.original.sha256 == wanted.sha256 and registration.may_use(one.event):
                return one.event.dataset
        raise refuse(
            f"{key}.sha256",
            f"is {wanted.sha256}, and no version of dataset {name} has that file; upload it as a "
            "version with --overwrite",
        )

    def pieces_of(self, upload: UploadOfFile) -> AsyncIterator[bytes]:
        """The bytes of a file that has arrived."""
        return self._pieces_of(upload)

    async def _pieces_of(self, upload: UploadOfFile) -> AsyncIterator[bytes]:
        whole = await self._transfers.uploads.find(upload.upload)
        async for piece in self._transfers.uploads.chunks(whole):
            yield piece

    async def put(self, file: ImportedFile, pieces: AsyncIterator[bytes], run: str) -> ArtifactRef:
        """Store the bytes of a file. Raises Refused when they are not those that were announced."""
        key = f"runs/{run}/objects/{file.sha256}"
        stored = await self._blobs.put_stream(key, pieces)
        if stored.sha256 != file.sha256:
            await self._blobs.delete(stored.uri)
            raise refuse(file.path, "has changed since it was sent; send it again")
        return ArtifactRef(uri=stored.uri, sha256=file.sha256, size=file.size)


class _Files:
    """The files of an import while it is finalized."""

    def __init__(
        self, imports: EvaluationImports, state: ImportState, uploads: Mapping[str, UploadOfFile]
    ) -> None:
        self.evaluation = state.session.evaluation
        self.number = state.session.number
        self.files = {one.path: one for one in state.request.files}
        self._imports = imports
        self._uploads = uploads
        self._artifacts: dict[str, dict[str, ImportedFile]] = {}
        for one in state.request.files:
            match = OF_ATTEMPT.fullmatch(one.path)
            if match and match["artifact"]:
                self._artifacts.setdefault(match["attempt"], {})[match["artifact"]] = one

    async def read(self, path: str) -> bytes:
        """The bytes of a small file. Raises InvalidConfig when they are not those announced."""
        data = bytearray()
        async for piece in self._pieces(path):
            data += piece
        if hashlib.sha256(data).hexdigest() != self.files[path].sha256:
            raise refuse(path, "has changed since it was sent; send it again")
        return bytes(data)

    async def trajectory(self, attempt: LocalAttempt) -> AtifTrajectory | None:
        """The trajectory of an attempt, if it has one. Raises InvalidConfig."""
        path = attempt.trajectory
        if path is None:
            return None
        return await asyncio.to_thread(AtifTrajectory.parse, await self.read(path), path)

    async def store_artifacts(self, attempt: str) -> dict[str, ArtifactRef]:
        """Store what an attempt left behind. Returns it by name."""
        named = self._artifacts.get(attempt, {})
        return {name: await self.store(file.path) for name, file in sorted(named.items())}

    async def store(self, path: str) -> ArtifactRef:
        return await self._imports.put(self.files[path], self._pieces(path), self.evaluation)

    async def _pieces(self, path: str) -> AsyncIterator[bytes]:
        if self.files[path].size:
            async for piece in self._imports.pieces_of(self._uploads[path]):
                yield piece


def _pages(imported: EvaluationImported, rows: Sequence[ImportedRow]) -> Iterator[Event]:
    """The rows in events that are small enough."""
    page: list[ImportedRow] = []
    size = number = 0
    for row in rows:
        more = len(row.model_dump_json().encode()) + 1
        if page and size + more > PAGE_BYTES:
            yield _page(imported, number, page)
            page, size, number = [], 0, number + 1
        page.append(row)
        size += more
    yield _page(imported, number, page)


def _page(imported: EvaluationImported, number: int, rows: Sequence[ImportedRow]) -> Event:
    return EvaluationRowsImported(
        evaluation=imported.evaluation, number=imported.number, page=number, rows=tuple(rows)
    )


def _find_arrived(request: ImportRequest, uploads: Mapping[str, UploadOfFile]) -> Iterator[str]:
    """The files that have arrived. Nothing is sent of an empty one."""
    for one in request.files:
        held = uploads.get(one.path)
        if one.size == 0 or (held is not None and held.status == "complete"):
            yield one.path


def _file(request: ImportRequest, path: str, key: str) -> ImportedFile:
    for one in request.files:
        if one.path == path:
            return one
    raise refuse(key, f"names {path[:200]!r}, which the import does not have")


def _is_of(newest: EvaluationImported, session: ImportSession, request: ImportRequest) -> bool:
    same = newest.content_sha256 == request.content_sha256
    return same and newest.number == session.number


def _newest_in(events: Sequence[Recorded]) -> EvaluationImported | None:
    found = [one.event for one in events if isinstance(one.event, EvaluationImported)]
    return found[-1] if found else None


def _check_replaces(request: ImportRequest, newest: EvaluationImported) -> None:
    """Raises Conflict unless the request may replace what was imported."""
    if newest.local_run.manifest_sha256 != request.manifest_digest:
        raise Conflict(
            f"local run {request.local_run_id} was imported as {newest.eval_name} with another "
            "manifest, so it is another run; delete that evaluation first"
        )
    if not request.reimport:
        raise _other_content(newest)


def _other_content(newest: EvaluationImported) -> Conflict:
    return Conflict(
        f"local run {newest.local_run.id} was imported as {newest.eval_name} with other results "
        f"(import {newest.number}); replace them with --replace"
    )
