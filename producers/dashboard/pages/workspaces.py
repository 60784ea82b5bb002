"""Workspaces: the list, and one with its rollouts and what arrived about its repository."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from producers.core.deliveries import page_of_deliveries, request_refs_check
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.requests import cause_of
from producers.http.responses import page_of
from producers.http.routes.runs import services
from producers.http.routes.workspaces import find_workspace_json, to_json


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.workspaces(page)
    values = {"rows": [to_json(row) for row in rows], "total": total, "page": page}
    return html(request, "workspaces.html", values)


async def show(request: Request) -> Response:
    core, page = services(request), page_of(request)
    workspace = await find_workspace_json(request, request.path_params["ref"])
    found, total = await page_of_deliveries(core.readmodel.deliveries, str(workspace["id"]), page)
    values = {"workspace": workspace, "deliveries": found, "total": total, "page": page}
    return html(request, "workspace.html", values)


async def sync(request: Request) -> Response:
    """Ask for the refs of the repository now, and go back to the page."""
    await read_session_form(request)
    core = services(request)
    workspace = await core.workspaces.find(request.path_params["ref"])
    await request_refs_check(core.log, workspace.id, cause=cause_of(request, "sync"))
    return RedirectResponse(f"/workspaces/{workspace.id}", status_code=303)


ROUTES = [
    PageRoute("/workspaces", index, scope="read"),
    PageRoute("/workspaces/{ref}", show, scope="read"),
    PageRoute("/workspaces/{ref}/sync", sync, scope="control", methods=["POST"]),
]
