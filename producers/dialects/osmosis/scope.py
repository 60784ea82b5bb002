"""The workspace of a request. The client names it in exactly one of two headers, and everything that
a request finds is found within it.

A workspace that the sender may not see answers like one that does not exist, so nobody learns the
names of other tenants.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from infra.ports.actor import narrowed_to
from producers.core.workspaces import NAME, Workspace, Workspaces
from producers.dialects.osmosis.client_form import PREFIX
from producers.dialects.osmosis.errors import ClientRefused, response_of
from producers.dialects.osmosis.requests import services
from producers.http.routing import Endpoint, RouteScope, ScopedRoute
from schemas.errors import NotFound

GIT = "x-osmosis-git"
WORKSPACE = "x-osmosis-workspace"

REPOSITORY = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,99}/[a-z0-9_.-]{1,100}$")

WorkspaceEndpoint: TypeAlias = Callable[[Request, Workspace], Awaitable[Response]]


def route(
    path: str, endpoint: Endpoint, *, scope: RouteScope, methods: tuple[str, ...] = ("GET",)
) -> ScopedRoute:
    """A route of the client, whose path is below the prefix."""

    async def respond(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientRefused as error:
            return response_of(error)

    return ScopedRoute(f"{PREFIX}{path}", respond, scope=scope, methods=methods)


def in_workspace(endpoint: WorkspaceEndpoint) -> Endpoint:
    """An endpoint that is served within the workspace that the request names. What belongs to other
    workspaces does not exist for it."""

    async def respond(request: Request) -> Response:
        workspace = await workspace_of(request)
        with narrowed_to(workspace.id, workspace.organisation):
            return await endpoint(request, workspace)

    return respond


def has_scope(request: Request) -> bool:
    """Whether a request names a workspace."""
    return GIT in request.headers or WORKSPACE in request.headers


async def workspace_of(request: Request) -> Workspace:
    """The workspace that a request names. Raises ClientRefused with the client's code when it names
    none, two, or one that the sender does not see."""
    repositories, names = request.headers.getlist(GIT), request.headers.getlist(WORKSPACE)
    if repositories and names:
        raise ClientRefused(
            400,
            "WORKSPACE_SCOPE_HEADER_CONFLICT",
            "the request has X-Osmosis-Git and X-Osmosis-Workspace; send one of them",
        )
    if repositories:
        return await _by_repository(services(request).workspaces, repositories)
    if names:
        return await _by_name(services(request).workspaces, names)
    raise ClientRefused(
        400,
        "GIT_SCOPE_HEADER_REQUIRED",
        "the request names no workspace; send X-Osmosis-Git: OWNER/REPO, or run the command inside of "
        "the repository of a workspace",
    )


async def _by_repository(workspaces: Workspaces, given: list[str]) -> Workspace:
    repository = given[0].lower().removesuffix(".git")
    if len(given) > 1 or not REPOSITORY.fullmatch(repository) or ".." in repository:
        raise ClientRefused(
            400,
            "GIT_SCOPE_HEADER_INVALID",
            f"X-Osmosis-Git must be one OWNER/REPO, got {', '.join(given)[:120]!r}",
        )
    try:
        return await workspaces.of_repository(repository)
    except NotFound as error:
        raise ClientRefused(404, "GIT_REPOSITORY_NOT_CONNECTED", error.message) from error


async def _by_name(workspaces: Workspaces, given: list[str]) -> Workspace:
    name = given[0]
    try:
        if len(given) == 1 and NAME.fullmatch(name):
            return await workspaces.find_workspace(name)
    except NotFound:
        pass
    raise ClientRefused(
        404,
        "WORKSPACE_SCOPE_HEADER_ACCESS_DENIED",
        f"this API key sees no workspace {name[:80]!r}; `headrace workspace list` shows all",
    )
