"""Datasets: announce an upload, send its content, show the result."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.quotas import BLOCK_BYTES
from infra.readmodel.registry import DatasetJson
from producers.core.datasets import registration
from producers.core.datasets.mapping import as_query, from_query, mapping_of, unread
from producers.core.datasets.row_issues import RowIssue, to_text
from producers.http.auth import actor_of
from producers.http.downloads import download, first_lines
from producers.http.requests import body_of
from producers.http.responses import ApiResponse, number, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.datasets import DatasetRow
from schemas.errors import InvalidConfig, NotFound, Refused, TransientError
from schemas.events import DatasetRegistered


def to_json(
    dataset: DatasetJson, registered: DatasetRegistered | None = None
) -> Mapping[str, object]:
    """A dataset as JSON. With the event `registered` it also says how its columns were mapped."""
    columns = json.loads(dataset["columns"] or "[]")
    mapping = {"mapping": registered.mapping} if registered else {}
    return {**dataset, "columns": columns, "unread_columns": unread(columns), **mapping}


async def announce(request: Request) -> Response:
    body = await body_of(request, ("name", "file_name", "mapping"))
    mapping = mapping_of(body.values.get("mapping"))
    name, file_name = body.text("name"), body.text("file_name")
    registration.check_name(name)
    registration.file_kind(file_name)
    identity = (await registration.dataset_key(services(request).readmodel.names, name)).id
    await services(request).readmodel.uploads.announce(identity, name, file_name)
    pending = {"id": identity, "name": name, "status": "pending", "file_name": file_name}
    upload = {"path": f"/api/v1/datasets/{identity}/content{as_query(mapping)}"}
    return ApiResponse({"dataset": pending, "upload": upload}, status_code=201)


async def upload_content(request: Request) -> Response:
    """Receive, check, store and register a file."""
    core, ref = services(request), request.path_params["ref"]
    announced = await core.readmodel.uploads.find_upload(ref)
    if announced is None:
        raise NotFound(f"upload {ref} was not announced; send POST /api/v1/datasets first")
    name, file_name = announced
    found_issues: Sequence[RowIssue] = ()
    try:
        mapping = from_query(request.query_params.get("mapping"))
        async with registration.receive_upload(
            _count_body(request), core.settings.home / "uploads"
        ) as path:
            await core.readmodel.uploads.mark(ref, "processing")
            kind = registration.file_kind(file_name)
            checked = await registration.check(path, kind, mapping=mapping)
            found_issues = checked.report.issues
            recorded = await registration.register(
                checked,
                path,
                name=name,
                file_name=file_name,
                log=core.log,
                blobs=core.blobs,
                names=core.readmodel.names,
                mapping=mapping,
            )
    except Refused as refusal:
        await core.readmodel.uploads.reject(ref, refusal.message, issues=to_text(found_issues))
        raise
    await core.readmodel.caught_up(recorded.cursor)
    found = await core.readmodel.registry.dataset(ref)
    if found is None or not isinstance(recorded.event, DatasetRegistered):
        raise TransientError(f"dataset {name} is not in the read model yet; try again")
    return ApiResponse({"dataset": to_json(found, recorded.event)})


async def validate(request: Request) -> Response:
    """Check whether a file would be accepted, without storing it."""
    file_name = request.query_params.get("file_name")
    if not file_name:
        raise InvalidConfig(
            "file_name is missing from the query; give it, like ?file_name=data.jsonl"
        )
    kind = registration.file_kind(file_name)
    mapping = from_query(request.query_params.get("mapping"))
    home = services(request).settings.home
    async with registration.receive_upload(_count_body(request), home / "uploads") as path:
        report = (await registration.check(path, kind, mapping=mapping)).report
    issues = [
        {"key": issue.key, "message": issue.message, "did_you_mean": issue.did_you_mean}
        for issue in (one.for_text() for one in report.issues)
    ]
    return ApiResponse(
        {
            "valid": not issues,
            "num_rows": report.num_rows,
            "columns": report.columns,
            "unread_columns": unread(report.columns),
            "issues": issues,
        }
    )


async def _count_body(request: Request) -> AsyncIterator[bytes]:
    """The body of an upload, whose bytes count for the sender's quota before they are read. Raises
    QuotaExceeded."""
    quotas, actor = services(request).quotas, actor_of(request)
    length = request.headers.get("content-length", "")
    taken, size = int(length) if length.isascii() and length.isdigit() else 0, 0
    await quotas.take_bytes(actor, taken)
    async for chunk in request.stream():
        size += len(chunk)
        while size > taken:
            await quotas.take_bytes(actor, BLOCK_BYTES)
            taken += BLOCK_BYTES
        yield chunk


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.datasets(page)
    return page_response("datasets", [to_json(row) for row in rows], total, page)


async def show(request: Request) -> Response:
    ref = request.path_params["ref"]
    found = await services(request).readmodel.registry.dataset(ref)
    if found is None:
        await registration.find(services(request).log, services(request).readmodel.names, ref)
        raise TransientError(f"dataset {ref} is not in the read model yet; try again")
    registered = await _find_registration(request) if found["status"] == "uploaded" else None
    return ApiResponse({"dataset": to_json(found, registered)})


async def preview(request: Request) -> Response:
    registered = await _find_registration(request)
    count = number(request, "rows", default=5, least=1, most=100)
    lines = await first_lines(request, registered.dataset.content, count)
    rows = [DatasetRow.model_validate_json(line).model_dump(mode="json") for line in lines]
    return ApiResponse({"rows": rows, "columns": registered.columns})


async def download_content(request: Request) -> Response:
    registered = await _find_registration(request)
    return await download(request, registered.original, registered.file_name)


async def _find_registration(request: Request) -> DatasetRegistered:
    core = services(request)
    return await registration.find(core.log, core.readmodel.names, request.path_params["ref"])


ROUTES = [
    ScopedRoute("/datasets", announce, scope="submit", methods=["POST"]),
    ScopedRoute("/datasets", index, scope="read"),
    ScopedRoute("/datasets/validate", validate, scope="submit", methods=["POST"]),
    ScopedRoute("/datasets/{ref}", show, scope="read"),
    ScopedRoute("/datasets/{ref}/content", upload_content, scope="submit", methods=["PUT"]),
    ScopedRoute("/datasets/{ref}/content", download_content, scope="read"),
    ScopedRoute("/datasets/{ref}/preview", preview, scope="read"),
]
