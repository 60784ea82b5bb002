"""Imports of evaluations that ran elsewhere: announce the files, send them, and finalize."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.blobs.uploads import EXPIRES
from producers.core.evaluations.import_request import ImportRequest
from producers.core.evaluations.imports import ImportState
from producers.http.requests import body_of, json_object, own_address
from producers.http.responses import ApiResponse
from producers.http.routes.datasets import parts_in, plan_json
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue

MOST_BYTES = 8 << 20
"""Bytes of a request that announces files."""


async def begin(request: Request) -> Response:
    """Begin an import, or go on with it. The body may name a `workspace`."""
    values = await json_object(request, most=MOST_BYTES)
    named = values.pop("workspace", None)
    if named is not None and not isinstance(named, str):
        message = "must be the name of a workspace"
        raise InvalidConfig(f"workspace {message}", issues=(Issue("workspace", message),))
    workspace = await services(request).workspaces.choose(named)
    state = await services(request).evaluation_imports.begin(
        ImportRequest.parse(values), workspace=workspace.id
    )
    return ApiResponse({"import": import_json(state)}, status_code=200 if state.imported else 201)


async def show(request: Request) -> Response:
    """An import with the states of its files."""
    state = await services(request).evaluation_imports.find(request.path_params["ref"])
    return ApiResponse({"import": import_json(state)})


async def plan(request: Request) -> Response:
    """Where to send those of the `paths` that have not arrived."""
    body, core = await body_of(request, ("paths",)), services(request)
    found = await core.evaluation_imports.plan(
        request.path_params["ref"], paths_in(body.values), address=own_address(request)
    )
    return ApiResponse(
        {"files": [{"path": file.path, "upload": plan_json(one)} for file, one in found]}
    )


async def complete(request: Request) -> Response:
    """Complete the upload of the file at `path`."""
    body = await body_of(request, ("path", "parts"))
    parts = parts_in(body.values.get("parts"), number="part_number", etag="etag")
    imports, ref = services(request).evaluation_imports, request.path_params["ref"]
    await imports.complete(ref, body.text("path"), parts)
    return ApiResponse({"import": import_json(await imports.find(ref))})


async def finalize(request: Request) -> Response:
    """Import the results. Doing so again changes nothing."""
    await body_of(request, ())
    return ApiResponse({"import": import_json(await finish(request))})


async def finish(request: Request) -> ImportState:
    """Finalize the import that the path names, and wait until lists have it."""
    core = services(request)
    state = await core.evaluation_imports.finalize(request.path_params["ref"])
    await core.readmodel.caught_up(await core.log.visible_head())
    return state


def paths_in(values: Mapping[str, object]) -> list[str]:
    """The paths that a request names. Raises InvalidConfig."""
    found = values.get("paths")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        message = "must be a list of paths"
        raise InvalidConfig(f"paths {message}", issues=(Issue("paths", message),))
    return found


def import_json(state: ImportState) -> Mapping[str, object]:
    """An import as JSON."""
    request, imported = state.request, state.imported
    return {
        "id": state.session.id,
        "status": "uploading" if imported is None else "finalized",
        "number": state.session.number,
        "eval": imported.evaluation if imported else None,
        "eval_name": imported.eval_name if imported else None,
        "expires_at": state.session.created_at + EXPIRES,
        "files": [
            {
                "path": one.path,
                "size": one.size,
                "sha256": one.sha256,
                "state": "uploaded" if one.path in state.arrived else "pending",
            }
            for one in request.files
        ],
    }


ROUTES = [
    ScopedRoute("/evals/imports", begin, scope="submit", methods=["POST"]),
    ScopedRoute("/evals/imports/{ref}", show, scope="submit"),
    ScopedRoute("/evals/imports/{ref}/uploads", plan, scope="submit", methods=["POST"]),
    ScopedRoute(
        "/evals/imports/{ref}/uploads/complete", complete, scope="submit", methods=["POST"]
    ),
    ScopedRoute("/evals/imports/{ref}/finalize", finalize, scope="submit", methods=["POST"]),
]
