"""Workspaces: the list, one with its rollouts and what arrived about its repository, and where its
alerts go."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.readmodel.deliveries import KINDS
from infra.settings.alerts import ALERT_KINDS
from producers.core.repositories.deliveries import page_of_deliveries, request_refs_check
from producers.dashboard.forge_links import commit_address
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.requests import cause_of
from producers.http.responses import ApiResponse, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routes.workspaces import (
    delivery_filter,
    delivery_json,
    find_workspace_json,
    show_alerts,
    to_json,
)
from schemas.errors import Issue, Refused


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.workspaces(page)
    values = {"rows": [to_json(row) for row in rows], "total": total, "page": page}
    return html(request, "workspaces.html", values)


async def list_data(request: Request) -> Response:
    """The same workspaces as JSON."""
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.workspaces(page)
    return page_response("workspaces", [to_json(row) for row in rows], total, page)


async def show(request: Request) -> Response:
    core, page = services(request), page_of(request)
    workspace = await find_workspace_json(request, request.path_params["ref"])
    table, chosen = core.readmodel.deliveries, delivery_filter(request)
    found, total = await page_of_deliveries(table, str(workspace["id"]), page, chosen)
    values = {
        "workspace": workspace,
        "commit_address": _commit_address(workspace, workspace["commit_sha"]),
        "triggers": [
            {"trigger": one, "commit_address": _commit_address(workspace, one["after"])}
            for one in await table.triggers(str(workspace["id"]))
        ],
        "deliveries": [
            {"delivery": one, "commit_address": _commit_address(workspace, one.row["after"])}
            for one in found
        ],
        "kinds": KINDS,
        "total": total,
        "page": page,
    }
    return html(request, "workspace.html", values)


async def data(request: Request) -> Response:
    """The same as JSON: the workspace, its triggers, and a page of its deliveries."""
    core, page = services(request), page_of(request)
    workspace = await find_workspace_json(request, request.path_params["ref"])
    table, chosen = core.readmodel.deliveries, delivery_filter(request)
    found, total = await page_of_deliveries(table, str(workspace["id"]), page, chosen)
    return ApiResponse(
        {
            "workspace": workspace,
            "triggers": await table.triggers(str(workspace["id"])),
            "deliveries": [delivery_json(one) for one in found],
            "total": total,
        }
    )


def _commit_address(workspace: Mapping[str, object], sha: object) -> str | None:
    """The page of a commit on the forge of a workspace, or None."""
    url, forge = str(workspace["url"]), workspace["forge"]
    return commit_address(url, str(sha) if sha else None, forge=str(forge) if forge else None)


async def sync(request: Request) -> Response:
    """Ask for the refs of the repository now, and go back to the page."""
    await read_session_form(request)
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    await request_refs_check(core.log, workspace.id, cause=cause_of(request, "sync"))
    return RedirectResponse(f"/workspaces/{workspace.id}", status_code=303)


async def alerts(request: Request) -> Response:
    """Where the alerts of a workspace go, and a form for another target."""
    return await _alerts_page(request)


async def add_alert(request: Request) -> Response:
    """Add a target, and show its secret once."""
    fields = await read_session_form(request)
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    try:
        target, secret = await core.alert_targets.add(
            workspace.id,
            fields.get("medium", ""),
            fields.get("address", "").strip(),
            kinds=[kind for kind in ALERT_KINDS if f"on.{kind}" in fields],
            by=actor_of(request).name,
        )
    except Refused as error:
        issues = error.issues or (Issue("", error.message),)
        return await _alerts_page(request, fields=fields, issues=issues, status=error.status)
    return await _alerts_page(request, secret=secret, about=target.shown)


async def rotate_alert(request: Request) -> Response:
    """Give a webhook another secret, and show it once."""
    await read_session_form(request)
    core, target = services(request), request.path_params["target"]
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    secret = await core.alert_targets.rotate(workspace.id, target)
    return await _alerts_page(request, secret=secret, about=target)


async def remove_alert(request: Request) -> Response:
    await read_session_form(request)
    core, target = services(request), request.path_params["target"]
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    await core.alert_targets.remove(workspace.id, target)
    return RedirectResponse(f"/workspaces/{workspace.id}/alerts", status_code=303)


async def _alerts_page(
    request: Request,
    *,
    secret: str | None = None,
    about: str = "",
    fields: Mapping[str, str] | None = None,
    issues: tuple[Issue, ...] = (),
    status: int = 200,
) -> Response:
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    values = {
        "workspace": workspace,
        "targets": await core.alert_targets.of_workspace(workspace.id),
        "kinds": ALERT_KINDS,
        "secret": secret,
        "about": about,
        "fields": fields,
        "issues": issues,
    }
    return html(request, "workspace_alerts.html", values, status=status)


ROUTES = [
    PageRoute("/workspaces", index, scope="read"),
    PageRoute("/workspaces.json", list_data, scope="read"),
    PageRoute("/workspaces/{ref}/deliveries.json", data, scope="read"),
    PageRoute("/workspaces/{ref}", show, scope="read"),
    PageRoute("/workspaces/{ref}/alerts", alerts, scope="control"),
    PageRoute("/workspaces/{ref}/alerts.json", show_alerts, scope="control"),
    PageRoute("/workspaces/{ref}/alerts", add_alert, scope="control", methods=["POST"]),
    PageRoute(
        "/workspaces/{ref}/alerts/{target}/rotate", rotate_alert, scope="control", methods=["POST"]
    ),
    PageRoute(
        "/workspaces/{ref}/alerts/{target}/remove", remove_alert, scope="control", methods=["POST"]
    ),
    PageRoute("/workspaces/{ref}/sync", sync, scope="control", methods=["POST"]),
]
