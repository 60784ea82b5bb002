"""Datasets: announce an upload, send its content, show the result."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from infra.blobs.staged_uploads import StagedUpload
from infra.blobs.uploads import MAX_BYTES, MOST_PARTS
from infra.identity.quotas import BLOCK_BYTES
from infra.readmodel.registry import DatasetJson
from producers.core.datasets import registration
from producers.core.datasets.from_run import StepRange, made_json
from producers.core.datasets.mapping import as_query, from_query, mapping_of, unread
from producers.core.datasets.recorded_rows import RowFilter
from producers.core.datasets.row_issues import RowIssue, to_text
from producers.core.datasets.rules import MAX_ROWS
from producers.core.datasets.transfers import UploadPlan
from producers.core.datasets.versions import split_version
from producers.http.auth import actor_of
from producers.http.downloads import download, first_lines
from producers.http.requests import JsonBody, body_of, own_address
from producers.http.responses import ApiResponse, number, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from producers.http.services import Services
from schemas.datasets import DatasetRow, RowsKind
from schemas.errors import InvalidConfig, Issue, NotFound, Refused, TransientError
from schemas.events import DatasetRegistered
from schemas.limits import LARGEST_REWARD

MAX_STEP = 2**31 - 1
FROM_RUN = (
    "run",
    "name",
    "as",
    "first_step",
    "last_step",
    "min_reward",
    "max_reward",
    "dedupe",
    "best_of_group",
    "limit",
    "reward_margin",
    "overwrite",
    "dry_run",
)
ANNOUNCED = ("name", "file_name", "mapping", "file_size", "overwrite", "sha256")


def to_json(
    dataset: DatasetJson, registered: DatasetRegistered | None = None
) -> Mapping[str, object]:
    """A dataset as JSON. With the event `registered` it also says how its columns were mapped, and which
    run its rows come from."""
    columns = json.loads(dataset["columns"] or "[]")
    more: dict[str, object] = {"mapping": registered.mapping} if registered else {}
    if registered is not None and registered.origin is not None:
        more["origin"] = registered.origin.model_dump(mode="json", exclude_defaults=True)
    shown = {key: value for key, value in dataset.items() if key != "is_newest"}
    return {**shown, "columns": columns, "unread_columns": unread(columns), **more}


async def announce(request: Request) -> Response:
    """Expect a file: with its `file_size` in parts, and else in one request."""
    body = await body_of(request, ANNOUNCED)
    mapping = mapping_of(body.values.get("mapping"))
    name, file_name = body.text("name"), body.text("file_name")
    if "file_size" in body.values:
        begun = await services(request).dataset_uploads.begin(
            name,
            file_name,
            body.integer("file_size", default=0, least=1, most=MAX_BYTES),
            overwrites=body.flag("overwrite"),
            sha256=body.optional("sha256"),
            mapping=mapping,
        )
        return await _begun_response(request, begun)
    registration.check_name(name)
    registration.file_kind(file_name)
    identity = (await registration.dataset_key(services(request).readmodel.names, name)).id
    await services(request).readmodel.uploads.announce(identity, name, file_name)
    pending = {"id": identity, "name": name, "status": "pending", "file_name": file_name}
    upload = {"path": f"/api/v1/datasets/{identity}/content{as_query(mapping)}"}
    return ApiResponse({"dataset": pending, "upload": upload}, status_code=201)


async def _begun_response(request: Request, begun: StagedUpload | DatasetRegistered) -> Response:
    """The plan of an upload, or the dataset that has the same file already."""
    core = services(request)
    if isinstance(begun, DatasetRegistered):
        found = await dataset_row(core, begun.dataset.dataset)
        return ApiResponse({"dataset": to_json(found, begun), "upload": None})
    plan = await core.dataset_uploads.plan(begun.id, address=own_address(request))
    return ApiResponse({"dataset": upload_json(begun), "upload": plan_json(plan)}, status_code=201)


def upload_json(upload: StagedUpload) -> Mapping[str, object]:
    """An upload in stages as JSON. `dataset` is the id of the version that it became."""
    return {
        "id": upload.id,
        "name": upload.name,
        "status": upload.status,
        "error": upload.error,
        "file_name": upload.file_name,
        "file_size": upload.file_size,
        "created_at": upload.created_at,
        "dataset": upload.dataset,
    }


def plan_json(plan: UploadPlan) -> Mapping[str, object]:
    """How to send the parts of an upload, as JSON. A part with an ETag has arrived."""
    return {
        "method": "multipart" if plan.is_multipart else "simple",
        "part_size": plan.part_size,
        "total_parts": len(plan.parts),
        "expires_in": plan.expires_in,
        "parts": [
            {"part_number": p.number, "size": p.size, "url": p.url, "etag": p.etag}
            for p in plan.parts
        ],
    }


async def dataset_row(core: Services, identity: str) -> DatasetJson:
    """The row of a dataset that was just registered. Raises TransientError when it is not there yet."""
    await core.readmodel.caught_up(await core.log.visible_head())
    found = await core.readmodel.registry.dataset(identity)
    if found is None:
        raise TransientError(f"dataset {identity} is not in the read model yet; try again")
    return found


async def show_plan(request: Request) -> Response:
    """The parts of an upload that goes on, with new URLs."""
    core, ref = services(request), request.path_params["ref"]
    plan = await core.dataset_uploads.plan(ref, address=own_address(request))
    upload = await core.dataset_uploads.find(ref)
    return ApiResponse({"dataset": upload_json(upload), "upload": plan_json(plan)})


async def complete(request: Request) -> Response:
    """Complete an upload: its file is checked in the background."""
    body = await body_of(request, ("parts",))
    parts = parts_in(body.values.get("parts"), number="part_number", etag="etag")
    upload = await services(request).dataset_uploads.complete(request.path_params["ref"], parts)
    return ApiResponse({"dataset": upload_json(upload)}, status_code=202)


def parts_in(value: object, *, number: str, etag: str) -> list[tuple[int, str]] | None:
    """The parts that a client names: the number and the ETag of each under these keys. None when it
    names none. Raises InvalidConfig."""
    if value is None:
        return None
    found = []
    for one in value if isinstance(value, list) and len(value) <= MOST_PARTS else [None]:
        given = (one.get(number), one.get(etag)) if isinstance(one, dict) else (None, None)
        if type(given[0]) is not int or not isinstance(given[1], str):
            message = f"must be a list of objects with {number} (a number) and {etag} (text)"
            raise InvalidConfig(f"parts {message}", issues=(Issue("parts", message),))
        found.append((given[0], given[1]))
    return found


async def abort(request: Request) -> Response:
    upload = await services(request).dataset_uploads.abort(request.path_params["ref"])
    return ApiResponse({"dataset": upload_json(upload)})


async def logs(request: Request) -> Response:
    """The log of the upload of a dataset: the newest lines before `cursor`, the oldest of them first."""
    core, ref = services(request), request.path_params["ref"]
    limit = number(request, "limit", default=50, least=1, most=200)
    before = number(request, "cursor", default=0, least=0, most=2**31 - 1) or None
    upload = await core.dataset_uploads.find_id(ref)
    lines = await core.dataset_uploads.lines(upload, limit=limit, before=before)
    more = bool(lines) and lines[0].line > 1
    return ApiResponse(
        {
            "logs": [
                {"at": one.at, "level": one.level, "step": one.step, "message": one.message}
                for one in lines
            ],
            "next_cursor": str(lines[0].line) if more else None,
        }
    )


async def versions(request: Request) -> Response:
    core = services(request)
    _, event = await registration.registration(
        core.log, core.readmodel.names, request.path_params["ref"]
    )
    found = await core.readmodel.registry.versions(event.series or event.dataset.dataset)
    return ApiResponse({"versions": [to_json(row) for row in found]})


async def download_url(request: Request) -> Response:
    """A signed URL by which the file of a dataset can be read without an API key."""
    registered = await _find_registration(request)
    link = await services(request).transfers.dataset_url(registered, address=own_address(request))
    return ApiResponse(
        {"url": link.url, "expires_in": link.expires_in, "file_name": link.file_name}
    )


async def upload_content(request: Request) -> Response:
    """Receive, check, store and register a file."""
    core, ref = services(request), request.path_params["ref"]
    announced = await core.readmodel.uploads.find_upload(ref)
    if announced is None:
        raise NotFound(f"upload {ref} was not announced; send POST /api/v1/datasets first")
    name, file_name = announced
    found_issues: Sequence[RowIssue] = ()
    async with AsyncExitStack() as stack:
        try:
            mapping = from_query(request.query_params.get("mapping"))
            path = await _receive(request, stack)
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


async def _receive(request: Request, stack: AsyncExitStack) -> Path:
    """Receive the file of a request. Until the stack ends its bytes count as stored, and the file is
    there. Raises QuotaExceeded."""
    quotas, home = services(request).quotas, services(request).settings.home
    declared = _declared_bytes(request)
    if declared:
        await stack.enter_async_context(quotas.room_for_bytes(declared))
    path = await stack.enter_async_context(
        registration.receive_upload(_count_body(request), home / "uploads")
    )
    if not declared:
        size = (await asyncio.to_thread(path.stat)).st_size
        await stack.enter_async_context(quotas.room_for_bytes(size))
    return path


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
    taken, size = _declared_bytes(request), 0
    await quotas.take_bytes(actor, taken)
    async for chunk in request.stream():
        size += len(chunk)
        while size > taken:
            await quotas.take_bytes(actor, BLOCK_BYTES)
            taken += BLOCK_BYTES
        yield chunk


def _declared_bytes(request: Request) -> int:
    """The length of a body as its header says; 0 when it says none."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


async def make_from_run(request: Request) -> Response:
    """Make a dataset of the samples that a run or an evaluation recorded, or count its rows
    (`dry_run`)."""
    core, body = services(request), await body_of(request, FROM_RUN)
    steps = StepRange(
        body.optional_integer("first_step", least=1, most=MAX_STEP),
        body.optional_integer("last_step", least=1, most=MAX_STEP),
    )
    made = await core.recorded_datasets.make(
        body.text("run"),
        body.text("name"),
        _row_filter(body),
        steps=steps,
        overwrites=body.flag("overwrite"),
        is_dry=body.flag("dry_run"),
    )
    counts = made_json(made)
    if made.recorded is None or not isinstance(made.recorded.event, DatasetRegistered):
        return ApiResponse({"dataset": None, "made": counts})
    found = await dataset_row(core, made.recorded.event.dataset.dataset)
    return ApiResponse(
        {"dataset": to_json(found, made.recorded.event), "made": counts}, status_code=201
    )


def _row_filter(body: JsonBody) -> RowFilter:
    kind = body.text("as")
    if kind not in get_args(RowsKind):
        message = f"must be one of {', '.join(get_args(RowsKind))}, got {kind!r:.40}"
        raise InvalidConfig(f"as {message}", issues=(Issue("as", message),))
    return RowFilter(
        kind=cast(RowsKind, kind),
        min_reward=body.optional_number("min_reward", least=-LARGEST_REWARD, most=LARGEST_REWARD),
        max_reward=body.optional_number("max_reward", least=-LARGEST_REWARD, most=LARGEST_REWARD),
        dedupe=body.flag("dedupe"),
        best_of_group=body.flag("best_of_group"),
        limit=body.optional_integer("limit", least=1, most=MAX_ROWS),
        reward_margin=body.number("reward_margin", default=0.0, least=0, most=2 * LARGEST_REWARD),
    )


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.datasets(page)
    return page_response("datasets", [to_json(row) for row in rows], total, page)


async def show(request: Request) -> Response:
    core, ref = services(request), request.path_params["ref"]
    try:
        upload = await core.dataset_uploads.find(ref)
    except NotFound:
        pass
    else:
        if upload.dataset is None:
            return ApiResponse({"dataset": upload_json(upload)})
        await dataset_row(core, upload.dataset)
        ref = upload.dataset
    name, version = split_version(ref)
    found = await core.readmodel.registry.dataset(name, version=version)
    if found is None:
        await registration.find(services(request).log, services(request).readmodel.names, ref)
        raise TransientError(f"dataset {ref} is not in the read model yet; try again")
    is_dataset = found["status"] == "uploaded"
    registered = (
        await registration.find(core.log, core.readmodel.names, found["id"]) if is_dataset else None
    )
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
    ScopedRoute("/datasets/from-run", make_from_run, scope="submit", methods=["POST"]),
    ScopedRoute("/datasets/validate", validate, scope="submit", methods=["POST"]),
    ScopedRoute("/datasets/{ref}", show, scope="read"),
    ScopedRoute("/datasets/{ref}/content", upload_content, scope="submit", methods=["PUT"]),
    ScopedRoute("/datasets/{ref}/content", download_content, scope="read"),
    ScopedRoute("/datasets/{ref}/preview", preview, scope="read"),
    ScopedRoute("/datasets/{ref}/upload", show_plan, scope="submit"),
    ScopedRoute("/datasets/{ref}/complete", complete, scope="submit", methods=["POST"]),
    ScopedRoute("/datasets/{ref}/abort", abort, scope="submit", methods=["POST"]),
    ScopedRoute("/datasets/{ref}/logs", logs, scope="read"),
    ScopedRoute("/datasets/{ref}/versions", versions, scope="read"),
    ScopedRoute("/datasets/{ref}/url", download_url, scope="read"),
]
