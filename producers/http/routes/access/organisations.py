"""Organisations: list those that the sender may see, make one, show one with its workspaces, and give it
another title."""

from collections.abc import Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from infra.identity.organisations import Organisation, unknown_organisation
from infra.ports.actor import key_workspace, visible_organisation
from producers.http.auth import actor_of
from producers.http.requests import body_of, limits_in
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute

API = "/api/v1"


def to_json(organisation: Organisation) -> Mapping[str, object]:
    """An organisation as JSON."""
    return asdict(organisation)


async def index(request: Request) -> Response:
    found = await services(request).organisations.list_visible(visible_organisation())
    return ApiResponse(
        {"organisations": [to_json(one) for one in found], "total_count": len(found)}
    )


async def create(request: Request) -> Response:
    body = await body_of(request, ("name", "title"))
    made = await services(request).organisations.make(
        body.text("name"),
        body.optional("title"),
        by=actor_of(request).name,
        reserved=first_segments(request),
    )
    return ApiResponse({"organisation": to_json(made)}, status_code=201)


async def show(request: Request) -> Response:
    """An organisation and those of its workspaces that the sender may see, and its quotas for an API key
    that is not bound to a workspace."""
    found = await find_organisation(request, request.path_params["ref"])
    workspaces = [
        {"id": one.id, "name": one.name, "url": one.url, "repository": one.repository}
        for one in await services(request).workspaces.visible(organisation=found.id)
    ]
    shown: dict[str, object] = {"organisation": to_json(found), "workspaces": workspaces}
    if key_workspace() is None:
        states = await services(request).quotas.show_organisation(found.id)
        shown["quotas"] = [asdict(one) for one in states]
    return ApiResponse(shown)


async def set_title(request: Request) -> Response:
    body = await body_of(request, ("title",))
    found = await find_organisation(request, request.path_params["ref"])
    changed = await services(request).organisations.set_title(found.id, body.text("title"))
    return ApiResponse({"organisation": to_json(changed)})


async def show_quotas(request: Request) -> Response:
    """The limits of an organisation, and what it used."""
    found = await find_organisation(request, request.path_params["ref"])
    states = await services(request).quotas.show_organisation(found.id)
    return ApiResponse({"organisation": found.name, "quotas": [asdict(one) for one in states]})


async def set_quotas(request: Request) -> Response:
    body = await body_of(request, ("limits",))
    found = await find_organisation(request, request.path_params["ref"])
    await services(request).quotas.limits.set_of_organisation(found.id, limits_in(body))
    return await show_quotas(request)


async def find_organisation(request: Request, ref: str) -> Organisation:
    """The organisation with this id or name. Raises NotFound, also for one that the sender may not
    see."""
    found = await services(request).organisations.find(ref)
    if visible_organisation() not in (None, found.id):
        raise unknown_organisation(ref)
    return found


async def organisation_id(request: Request, ref: str | None) -> str | None:
    """The id of an organisation by id or name, None without a name. Raises NotFound."""
    return None if ref is None else (await find_organisation(request, ref)).id


def first_segments(request: Request) -> frozenset[str]:
    """The words with which paths of the API begin, which name no organisation."""
    mounts = [r for r in request.app.routes if isinstance(r, Mount) and r.path == API]
    paths = [route.path for mount in mounts for route in mount.routes if isinstance(route, Route)]
    return frozenset(path.split("/")[1] for path in paths)


async def names_of(
    request: Request, organisation: str | None, workspace: str | None
) -> Mapping[str, str | None]:
    """The names of an organisation and a workspace (ids), to show them beside the ids: a user knows
    nothing else of them. A workspace has its id as its name until the read model has it."""
    core = services(request)
    home = None if organisation is None else await core.organisations.find(organisation)
    place = None if workspace is None else await core.readmodel.registry.workspace(workspace)
    return {
        "organisation_name": None if home is None else home.name,
        "workspace_name": workspace if place is None else place["name"],
    }


ROUTES = [
    ScopedRoute("/organisations", index, scope="read"),
    ScopedRoute("/organisations", create, scope="admin", reach="installation", methods=["POST"]),
    ScopedRoute("/organisations/{ref}", show, scope="read"),
    ScopedRoute(
        "/organisations/{ref}", set_title, scope="admin", reach="organisation", methods=["PUT"]
    ),
    ScopedRoute("/organisations/{ref}/quotas", show_quotas, scope="read", reach="organisation"),
    ScopedRoute(
        "/organisations/{ref}/quotas",
        set_quotas,
        scope="admin",
        reach="installation",
        methods=["POST"],
    ),
]
