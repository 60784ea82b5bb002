"""Datasets: list, upload in stages, show with the first rows, download, and the log of the check."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePath

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from infra.blobs.staged_uploads import NameTaken, StagedUpload
from infra.blobs.uploads import MOST_PARTS
from infra.readmodel.registry import DatasetJson
from producers.core.datasets import registration
from producers.core.datasets.first_rows import NUM_ROWS, parse_first_rows
from producers.core.datasets.transfers import UploadPlan
from producers.core.datasets.versions import split_version
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.errors import ClientRefused
from producers.dialects.osmosis.requests import (
    MOST_LINES,
    Wire,
    answer,
    page_answer,
    page_of,
    read_body,
    services,
)
from producers.dialects.osmosis.scope import in_workspace, route
from producers.http.downloads import first_lines
from producers.http.requests import own_address
from producers.http.responses import number
from schemas.errors import Conflict, NotFound
from schemas.events import DatasetRegistered

WAIT_S = 10.0
"""How long a completed upload waits for its check, so that most datasets can be used at once."""


class CreateDataset(Wire):
    file_name: str
    file_size: int
    extension: str
    overwrite_dataset_id: str | None = None


class NamedPart(Wire):
    PartNumber: int
    ETag: str


class CompleteUpload(Wire):
    file_extension: str | None = None
    parts: list[NamedPart] | None = Field(default=None, max_length=MOST_PARTS)


class SignedPart(Wire):
    part_number: int
    presigned_url: str
    size: int


class UploadWire(Wire):
    """How to send a file. `presigned_urls` are those of its parts."""

    method: str
    presigned_url: str | None
    expires_in: int
    upload_headers: Mapping[str, str] = {}
    part_size: int | None
    total_parts: int | None
    presigned_urls: list[SignedPart] | None


class DatasetWire(Wire):
    """A dataset. Its `file_name` is its name, because the client has no other."""

    id: str
    file_name: str
    file_size: int
    status: str
    data_preview: list[Mapping[str, object]] | None = None
    file_format: str
    original_file_format: str
    row_count: int | None = None
    original_file_size: int | None = None
    creator_name: str | None = None
    created_at: datetime
    updated_at: datetime
    platform_url: str | None = None
    is_internal_user: bool = False
    version: int | None = None
    upload: UploadWire | None = None


class DownloadWire(Wire):
    presigned_url: str
    expires_in: int
    file_name: str


class DatasetLine(Wire):
    timestamp: datetime
    level: str
    step: str
    message: str


class DatasetLines(Wire):
    logs: list[DatasetLine]
    next_cursor: str | None


async def index(request: Request, workspace: Workspace) -> Response:
    """Return a page of datasets, of each the newest version, and of uploads that are none yet."""
    del workspace  # the sender is within it, so that no other dataset is found
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.datasets(page)
    return page_answer("datasets", [_of_row(row) for row in rows], total, page)


async def create(request: Request, workspace: Workspace) -> Response:
    """Expect a file, and say where to send it."""
    body, core = await read_body(request, CreateDataset), services(request)
    if body.overwrite_dataset_id is not None:
        await _require_name(request, body.overwrite_dataset_id, body.file_name)
    try:
        begun = await core.dataset_uploads.begin(
            body.file_name,
            f"{body.file_name}.{body.extension.lstrip('.')}",
            body.file_size,
            overwrites=body.overwrite_dataset_id is not None,
        )
    except NameTaken as error:
        raise _conflict(error) from error
    if isinstance(begun, DatasetRegistered):  # only a file whose hash is known is found again
        raise Conflict(f"dataset {body.file_name} has this file already")
    plan = await core.dataset_uploads.plan(begun.id, address=own_address(request))
    return answer(_of_upload(begun, upload_plan=upload_wire(plan)), status=201)


async def complete(request: Request, workspace: Workspace) -> Response:
    """Have the file checked. The response waits for a short check."""
    body, core = await read_body(request, CompleteUpload), services(request)
    parts = None if body.parts is None else [(one.PartNumber, one.ETag) for one in body.parts]
    try:
        upload = await core.dataset_uploads.complete(request.path_params["ref"], parts)
    except NameTaken as error:
        raise _conflict(error) from error
    until = core.clock.elapsed_s() + WAIT_S
    while not upload.has_ended and core.clock.elapsed_s() < until:
        await asyncio.sleep(0.1)
        upload = await core.dataset_uploads.find(upload.id)
    return answer(await _dataset_of_upload(request, upload))


async def abort(request: Request, workspace: Workspace) -> Response:
    """End an upload that is not complete."""
    upload = await services(request).dataset_uploads.abort(request.path_params["ref"])
    return answer(_of_upload(upload))


async def show(request: Request, workspace: Workspace) -> Response:
    """Return a dataset with its first rows, or an upload that is none yet."""
    core, ref = services(request), request.path_params["ref"]
    try:
        upload = await core.dataset_uploads.find(ref)
    except NotFound:
        pass
    else:
        return answer(await _dataset_of_upload(request, upload))
    name, version = split_version(ref)
    row = await core.readmodel.registry.dataset(name, version=version)
    if row is not None and row["status"] != "uploaded":
        return answer(_of_row(row))
    return answer(await _dataset_of(request, ref))


async def download(request: Request, workspace: Workspace) -> Response:
    """Return a URL of the file of a dataset."""
    registered = await registration.find(
        services(request).log, services(request).readmodel.names, request.path_params["ref"]
    )
    link = await services(request).transfers.dataset_url(registered, address=own_address(request))
    return answer(
        DownloadWire(presigned_url=link.url, expires_in=link.expires_in, file_name=link.file_name)
    )


async def logs(request: Request, workspace: Workspace) -> Response:
    """Return the newest lines of the log of an upload before the cursor, the oldest of them first."""
    core = services(request)
    limit = number(request, "limit", default=50, least=1, most=MOST_LINES)
    before = number(request, "cursor", default=0, least=0, most=2**31 - 1) or None
    lines = await core.dataset_uploads.lines(
        await core.dataset_uploads.find_id(request.path_params["ref"]), limit=limit, before=before
    )
    found = [
        DatasetLine(timestamp=one.at, level=one.level, step=one.step, message=one.message)
        for one in lines
    ]
    has_more = bool(lines) and lines[0].line > 1
    return answer(DatasetLines(logs=found, next_cursor=str(lines[0].line) if has_more else None))


async def _require_name(request: Request, ref: str, name: str) -> None:
    """Check that the dataset to overwrite has the name of the file. Raises NotFound, Conflict."""
    _, event = await registration.registration(
        services(request).log, services(request).readmodel.names, ref
    )
    if event.dataset.name != name:
        raise Conflict(
            f"dataset {ref} has the name {event.dataset.name}, and the file the name {name}; rename "
            "the file, or upload it without --overwrite"
        )


async def _dataset_of_upload(request: Request, upload: StagedUpload) -> DatasetWire:
    if upload.dataset is None:
        return _of_upload(upload)
    return await _dataset_of(request, upload.dataset)


async def _dataset_of(request: Request, ref: str) -> DatasetWire:
    core = services(request)
    recorded, event = await registration.registration(core.log, core.readmodel.names, ref)
    kind = _kind(event.file_name)
    stored = event.original if kind in ("jsonl", "csv") else event.dataset.content
    lines = await first_lines(request, stored, NUM_ROWS + 1)
    return DatasetWire(
        id=event.dataset.dataset,
        file_name=event.dataset.name,
        file_size=event.file_size,
        status="uploaded",
        data_preview=parse_first_rows(lines, kind),
        file_format=kind,
        original_file_format=kind,
        row_count=event.dataset.num_rows,
        original_file_size=event.file_size,
        creator_name=(recorded.actor or "").partition("/")[0] or None,
        created_at=recorded.time,
        updated_at=recorded.time,
        version=event.dataset.version,
    )


def _of_row(row: DatasetJson) -> DatasetWire:
    kind = _kind(row["file_name"])
    return DatasetWire(
        id=row["id"],
        file_name=row["name"],
        file_size=row["file_size"] or 0,
        status=row["status"],
        file_format=kind,
        original_file_format=kind,
        row_count=row["num_rows"],
        original_file_size=row["file_size"],
        created_at=row["created_at"],
        updated_at=row["created_at"],
        version=row["version"],
    )


def _of_upload(upload: StagedUpload, *, upload_plan: UploadWire | None = None) -> DatasetWire:
    kind = _kind(upload.file_name)
    return DatasetWire(
        id=upload.id,
        file_name=upload.name,
        file_size=upload.file_size,
        status=upload.status,
        file_format=kind,
        original_file_format=kind,
        original_file_size=upload.file_size,
        created_at=upload.created_at,
        updated_at=upload.created_at,
        upload=upload_plan,
    )


def upload_wire(plan: UploadPlan) -> UploadWire:
    """How the client sends a file."""
    parts = [
        SignedPart(part_number=one.number, presigned_url=one.url, size=one.size)
        for one in plan.parts
    ]
    return UploadWire(
        method="multipart" if plan.is_multipart else "simple",
        presigned_url=None if plan.is_multipart else plan.parts[0].url,
        expires_in=plan.expires_in,
        part_size=plan.part_size if plan.is_multipart else None,
        total_parts=len(parts) if plan.is_multipart else None,
        presigned_urls=parts if plan.is_multipart else None,
    )


def _conflict(error: NameTaken) -> ClientRefused:
    fields = {} if error.holder is None else {"existing_dataset_id": error.holder}
    return ClientRefused(409, "CONFLICT", error.message, fields=fields)


def _kind(file_name: str) -> str:
    return PurePath(file_name).suffix.lstrip(".").lower()


ROUTES = [
    route("/datasets", in_workspace(index), scope="read"),
    route("/datasets", in_workspace(create), scope="submit", methods=("POST",)),
    route("/datasets/{ref}", in_workspace(show), scope="read"),
    route("/datasets/{ref}/complete", in_workspace(complete), scope="submit", methods=("POST",)),
    route("/datasets/{ref}/abort", in_workspace(abort), scope="submit", methods=("POST",)),
    route("/datasets/{ref}/download", in_workspace(download), scope="read"),
    route("/datasets/{ref}/logs", in_workspace(logs), scope="read"),
]
