"""Rename, delete, archive and restore runs, delete datasets, and delete old records and blobs that
nothing refers to."""

from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from infra.blobs.garbage import collect
from infra.operations.maintenance.records import EVALUATIONS, OTHERS
from infra.spine.ports.event_log import Cursor
from producers.http.requests import body_of, cause_of
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import run_json, services
from producers.http.routing import ScopedRoute

LONGEST_S = 100 * 365 * 24 * 3600


async def rename(request: Request) -> Response:
    ref = request.path_params["ref"]
    name = (await body_of(request, ("name",))).text("name")
    run, cursor = await services(request).retention.rename(
        ref, name, cause=cause_of(request, f"rename/{ref}")
    )
    return ApiResponse({"run": await run_json(request, run, after=cursor)})


async def archive(request: Request) -> Response:
    await body_of(request, ())
    run, cursor = await services(request).retention.archive(request.path_params["ref"])
    return ApiResponse({"run": await run_json(request, run, after=cursor)})


async def restore(request: Request) -> Response:
    await body_of(request, ())
    run, cursor = await services(request).retention.restore(request.path_params["ref"])
    return ApiResponse({"run": await run_json(request, run, after=cursor)})


async def delete_run(request: Request) -> Response:
    run, cursor = await services(request).retention.delete(request.path_params["ref"])
    return await _deleted_response(request, run, cursor)


async def delete_dataset(request: Request) -> Response:
    found, cursor = await services(request).retention.delete_dataset(request.path_params["ref"])
    return await _deleted_response(request, found, cursor)


async def _deleted_response(request: Request, identity: str, cursor: Cursor) -> Response:
    await services(request).readmodel.caught_up(cursor)
    return ApiResponse({"deleted": identity})


async def index_old(request: Request) -> Response:
    """List the runs that ended more than `older_than_s` seconds ago and are not archived, and count the
    records that are older."""
    core = services(request)
    seconds = number(request, "older_than_s", default=0, least=0, most=LONGEST_S)
    moment = core.clock.now() - timedelta(seconds=seconds)
    records = await core.records.count((EVALUATIONS, *OTHERS), before=moment)
    return ApiResponse({"runs": await core.readmodel.runs.ended_before(moment), "records": records})


async def collect_garbage(request: Request) -> Response:
    """Delete the blobs that nothing refers to. The server also does this by itself from time to time.
    With `older_than_s`, remove the records that are older before, and with `evaluations` those too."""
    body = await body_of(request, ("older_than_s", "evaluations"))
    core = services(request)
    removed: dict[str, int] = {}
    if "older_than_s" in body.values:
        seconds = body.number("older_than_s", default=0, least=0, most=LONGEST_S)
        moment = core.clock.now() - timedelta(seconds=seconds)
        kinds = (EVALUATIONS, *OTHERS) if body.flag("evaluations") else OTHERS
        removed = await core.records.remove(kinds, before=moment)
    count = await collect(core.database, core.blobs, now=core.clock.now())
    return ApiResponse({"collected": count, "records": removed})


ROUTES = [
    ScopedRoute("/runs/{ref}", delete_run, scope="control", methods=["DELETE"]),
    ScopedRoute("/runs/{ref}/rename", rename, scope="control", methods=["POST"]),
    ScopedRoute("/runs/{ref}/archive", archive, scope="control", methods=["POST"]),
    ScopedRoute("/runs/{ref}/restore", restore, scope="control", methods=["POST"]),
    ScopedRoute("/datasets/{ref}", delete_dataset, scope="control", methods=["DELETE"]),
    ScopedRoute("/gc", index_old, scope="admin", reach="installation"),
    ScopedRoute("/gc", collect_garbage, scope="admin", reach="installation", methods=["POST"]),
]
