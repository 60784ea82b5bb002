"""Imports of evaluations that the client ran on its own machine: `eval upload`."""

from datetime import datetime

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from infra.blobs.uploads import EXPIRES, MOST_PARTS
from producers.core.evaluations.import_request import ImportRequest
from producers.core.evaluations.imports import MOST_PATHS, ImportState
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.datasets import UploadWire, upload_wire
from producers.dialects.osmosis.requests import Wire, answer, read_body, services
from producers.dialects.osmosis.scope import in_workspace, route
from producers.http.evaluation_imports import MOST_BYTES, finish
from producers.http.requests import json_object, own_address


class WantedPaths(Wire):
    paths: list[str] = Field(min_length=1, max_length=MOST_PATHS)


class SentPart(Wire):
    part_number: int
    etag: str


class SentFile(Wire):
    path: str
    parts: list[SentPart] | None = Field(default=None, max_length=MOST_PARTS)


class ImportFileWire(Wire):
    path: str
    size: int
    sha256: str
    state: str


class ImportUploadWire(Wire):
    path: str
    size: int
    sha256: str
    upload: UploadWire


class ImportUploadsWire(Wire):
    files: list[ImportUploadWire]


class ImportWire(Wire):
    """An import. The evaluation is there once it is finalized."""

    session_id: str
    status: str
    expected_files: int
    uploaded_files: int
    files: list[ImportFileWire]
    expires_at: datetime
    eval_run_id: str | None
    eval_run_name: str | None
    platform_url: str | None


async def begin(request: Request, workspace: Workspace) -> Response:
    """Begin an import, or go on with it."""
    wanted = ImportRequest.parse(await json_object(request, most=MOST_BYTES))
    state = await services(request).evaluation_imports.begin(wanted, workspace=workspace.id)
    return answer(_wire(request, state), status=200 if state.imported else 201)


async def plan(request: Request, workspace: Workspace) -> Response:
    """Say where to send files that have not arrived."""
    del workspace
    body = await read_body(request, WantedPaths)
    found = await services(request).evaluation_imports.plan(
        request.path_params["ref"], body.paths, address=own_address(request)
    )
    files = [
        ImportUploadWire(
            path=file.path, size=file.size, sha256=file.sha256, upload=upload_wire(one)
        )
        for file, one in found
    ]
    return answer(ImportUploadsWire(files=files))


async def complete(request: Request, workspace: Workspace) -> Response:
    """Complete the upload of a file."""
    del workspace
    body, imports = await read_body(request, SentFile), services(request).evaluation_imports
    parts = None if body.parts is None else [(one.part_number, one.etag) for one in body.parts]
    await imports.complete(request.path_params["ref"], body.path, parts)
    return answer(_wire(request, await imports.find(request.path_params["ref"])))


async def finalize(request: Request, workspace: Workspace) -> Response:
    """Import the results."""
    del workspace
    await json_object(request)
    return answer(_wire(request, await finish(request)))


def _wire(request: Request, state: ImportState) -> ImportWire:
    imported = state.imported
    page = f"{services(request).settings.public_url}/evals/"
    return ImportWire(
        session_id=state.session.id,
        status="uploading" if imported is None else "finalized",
        expected_files=len(state.request.files),
        uploaded_files=len(state.arrived),
        files=[
            ImportFileWire(
                path=one.path,
                size=one.size,
                sha256=one.sha256,
                state="uploaded" if one.path in state.arrived else "pending",
            )
            for one in state.request.files
        ],
        expires_at=state.session.created_at + EXPIRES,
        eval_run_id=imported.evaluation if imported else None,
        eval_run_name=imported.eval_name if imported else None,
        platform_url=page + imported.evaluation if imported else None,
    )


ROUTES = [
    route("/eval-runs/imports", in_workspace(begin), scope="submit", methods=("POST",)),
    route(
        "/eval-runs/imports/{ref}/uploads", in_workspace(plan), scope="submit", methods=("POST",)
    ),
    route(
        "/eval-runs/imports/{ref}/uploads/complete",
        in_workspace(complete),
        scope="submit",
        methods=("POST",),
    ),
    route(
        "/eval-runs/imports/{ref}/finalize",
        in_workspace(finalize),
        scope="submit",
        methods=("POST",),
    ),
]
