"""Workspaces: register a repository, show what sync found in it, what arrived about it, and its
quotas and the targets of its alerts."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from infra.ports.actor import is_confined
from infra.readmodel.deliveries import KINDS, DeliveryFilter
from infra.readmodel.registry import WorkspaceJson
from infra.settings.alerts import ALERT_KINDS
from producers.core.repositories.deliveries import (
    ShownDelivery,
    page_of_deliveries,
    request_refs_check,
)
from producers.http.auth import actor_of
from producers.http.requests import body_of, cause_of, limits_in
from producers.http.responses import ApiResponse, page_of, page_response
from producers.http.routes.access.organisations import organisation_id
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue, TransientError


def to_json(workspace: WorkspaceJson) -> Mapping[str, object]:
    """A workspace as JSON. `rollouts` are those of the commit that sync examined last."""
    return {**workspace, "rollouts": json.loads(workspace["rollouts"])}


async def add(request: Request) -> Response:
    body = await body_of(request, ("url", "name", "organisation", "repository"))
    core = services(request)
    recorded = await core.workspaces.add(
        body.text("url"),
        body.optional("name"),
        organisation=await organisation_id(request, body.optional("organisation")),
        repository=body.optional("repository"),
    )
    await core.readmodel.caught_up(recorded.cursor)
    return ApiResponse(
        {"workspace": await find_workspace_json(request, recorded.event.run_id)}, status_code=201
    )


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.workspaces(page)
    return page_response("workspaces", [to_json(row) for row in rows], total, page)


async def show(request: Request) -> Response:
    return ApiResponse(
        {"workspace": await find_workspace_json(request, request.path_params["ref"])}
    )


async def set_repository(request: Request) -> Response:
    """Name a workspace after a repository `owner/repo`, or with null after none."""
    body = await body_of(request, ("repository",))
    core = services(request)
    workspace = await core.workspaces.set_repository(
        request.path_params["ref"], body.optional("repository")
    )
    return ApiResponse({"workspace": await find_workspace_json(request, workspace.id)})


async def sync(request: Request) -> Response:
    """Ask for the refs of a repository to be listed now. Answers before they are."""
    await body_of(request, ())
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    await request_refs_check(core.log, workspace.id, cause=cause_of(request, "sync"))
    return ApiResponse(
        {"workspace": await find_workspace_json(request, workspace.id)}, status_code=202
    )


async def rollouts(request: Request) -> Response:
    """The rollouts of a workspace, of a branch (`branch`) or of the default one."""
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    branch = request.query_params.get("branch") or None
    found = await core.rollouts.find(workspace, branch)
    rows = [
        {
            **one.found.model_dump(mode="json"),
            "commit_sha": one.commit,
            "synced_at": one.synced_at,
            "created_at": one.created_at,
        }
        for one in found
    ]
    return ApiResponse({"workspace": workspace.name, "branch": branch, "rollouts": rows})


async def deliveries(request: Request) -> Response:
    page = page_of(request)
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    chosen = delivery_filter(request)
    found, total = await page_of_deliveries(core.readmodel.deliveries, workspace.id, page, chosen)
    return page_response("deliveries", [delivery_json(each) for each in found], total, page)


async def show_quotas(request: Request) -> Response:
    """The limits of a workspace and of the sender's API key, and what they used."""
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    found = await core.quotas.show(workspace.id, actor_of(request))
    return ApiResponse({"workspace": workspace.name, "quotas": [asdict(one) for one in found]})


async def set_quotas(request: Request) -> Response:
    """Set limits: as the operator, or as an owner of the organisation within what the operator
    allows."""
    body = await body_of(request, ("limits",))
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    limits = limits_in(body)
    if is_confined():
        await core.quotas.limits.set_by_owner(workspace.id, workspace.organisation, limits)
    else:
        await core.quotas.limits.set_of_workspace(workspace.id, limits)
    return await show_quotas(request)


async def show_alerts(request: Request) -> Response:
    """The targets of a workspace's alerts, without addresses of webhooks and secrets."""
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    found = await core.alert_targets.of_workspace(workspace.id)
    return ApiResponse({"workspace": workspace.name, "targets": [asdict(one) for one in found]})


async def add_alert(request: Request) -> Response:
    """Add a target. The secret of a webhook is in this answer, and nowhere else."""
    body = await body_of(request, ("medium", "address", "kinds"))
    core = services(request)
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    kinds = body.values.get("kinds", list(ALERT_KINDS))
    if not isinstance(kinds, list):
        message = f"must be a list of {', '.join(ALERT_KINDS)}"
        raise InvalidConfig(f"kinds {message}", issues=(Issue("kinds", message),))
    target, secret = await core.alert_targets.add(
        workspace.id,
        body.text("medium"),
        body.text("address"),
        kinds=[str(kind) for kind in kinds],
        by=actor_of(request).name,
    )
    return ApiResponse({"target": asdict(target), "secret": secret}, status_code=201)


async def remove_alert(request: Request) -> Response:
    core, target = services(request), request.path_params["target"]
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    await core.alert_targets.remove(workspace.id, target)
    return ApiResponse({"removed": target})


async def rotate_alert(request: Request) -> Response:
    """Give a webhook another secret, which is in this answer, and nowhere else."""
    await body_of(request, ())
    core, target = services(request), request.path_params["target"]
    workspace = await core.workspaces.find_workspace(request.path_params["ref"])
    secret = await core.alert_targets.rotate(workspace.id, target)
    return ApiResponse({"target": target, "secret": secret})


def delivery_filter(request: Request) -> DeliveryFilter:
    """The deliveries that a query asks for: of a kind `event`, whose ref contains `ref`. Raises
    InvalidConfig."""
    kind = request.query_params.get("event") or None
    if kind is not None and kind not in KINDS:
        message = f"must be one of {', '.join(KINDS)}, got {kind[:20]!r}"
        raise InvalidConfig(f"event {message}", issues=(Issue("event", message),))
    return DeliveryFilter(kind, request.query_params.get("ref") or None)


def delivery_json(delivery: ShownDelivery) -> Mapping[str, object]:
    """A delivery, with what it led to."""
    row = delivery.row
    shown = ("at", "forge", "delivery", "ref", "before", "after", "forced", "pusher")
    return {
        **{key: value for key, value in row.items() if key in shown},
        "event": row["kind"],
        "push": row["number"],
        "result": delivery.result,
        "runs": delivery.runs,
    }


async def find_workspace_json(request: Request, ref: str) -> Mapping[str, object]:
    """The workspace with this id or name. Raises NotFound, and TransientError while the read model does
    not have it yet."""
    found = await services(request).readmodel.registry.workspace(ref)
    if found is None:
        await services(request).workspaces.find_workspace(ref)
        raise TransientError(f"workspace {ref} is not in the read model yet; try again")
    return to_json(found)


ROUTES = [
    ScopedRoute("/workspaces", add, scope="admin", reach="organisation", methods=["POST"]),
    ScopedRoute("/workspaces", index, scope="read"),
    ScopedRoute("/workspaces/{ref}", show, scope="read"),
    ScopedRoute(
        "/workspaces/{ref}/repository",
        set_repository,
        scope="admin",
        reach="organisation",
        methods=["PUT"],
    ),
    ScopedRoute("/workspaces/{ref}/sync", sync, scope="control", methods=["POST"]),
    ScopedRoute("/workspaces/{ref}/rollouts", rollouts, scope="read"),
    ScopedRoute("/workspaces/{ref}/deliveries", deliveries, scope="read"),
    ScopedRoute("/workspaces/{ref}/alerts", show_alerts, scope="control"),
    ScopedRoute("/workspaces/{ref}/alerts", add_alert, scope="control", methods=["POST"]),
    ScopedRoute(
        "/workspaces/{ref}/alerts/{target}", remove_alert, scope="control", methods=["DELETE"]
    ),
    ScopedRoute(
        "/workspaces/{ref}/alerts/{target}/rotate", rotate_alert, scope="control", methods=["POST"]
    ),
    ScopedRoute("/workspaces/{ref}/quotas", show_quotas, scope="read"),
    ScopedRoute(
        "/workspaces/{ref}/quotas",
        set_quotas,
        scope="admin",
        reach="organisation",
        methods=["POST"],
    ),
]
