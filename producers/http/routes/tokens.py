"""Tokens of the API: create, list, revoke. The text of a token is in the response to its creation, and
nowhere else."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.access.issuing import LONGEST_S, WantedToken
from infra.access.tokens import ApiToken
from producers.http.auth import actor_of
from producers.http.requests import body_of
from producers.http.responses import ApiResponse, flag, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue

FIELDS = ("name", "scopes", "owner", "workspace", "expires_s")


def to_json(token: ApiToken) -> Mapping[str, object]:
    """A token as JSON, without anything of its secret."""
    return {
        "id": token.id,
        "name": token.name,
        "owner": token.owner,
        "prefix": token.prefix,
        "scopes": sorted(token.scopes),
        "workspace": token.workspace,
        "expires_at": token.expires_at,
        "created_at": token.created_at,
        "created_by": token.created_by,
        "last_used_at": token.last_used_at,
        "revoked_at": token.revoked_at,
    }


async def create(request: Request) -> Response:
    body = await body_of(request, FIELDS)
    scopes = body.values.get("scopes", ["read"])
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        message = "must be a list of scopes"
        raise InvalidConfig(f"scopes {message}", issues=(Issue("scopes", message),))
    expires_s = None
    if body.values.get("expires_s") is not None:
        expires_s = body.number("expires_s", default=0, least=1, most=LONGEST_S)
    core, workspace = services(request), body.optional("workspace")
    wanted = WantedToken(
        name=body.text("name"),
        scopes=[str(scope) for scope in scopes],
        owner=body.optional("owner"),
        workspace=None if workspace is None else (await core.workspaces.find(workspace)).id,
        expires_s=expires_s,
    )
    made, issued = await core.access_tokens.create(wanted, actor_of(request))
    return ApiResponse({"token": to_json(made), "secret": issued.text}, status_code=201)


async def index(request: Request) -> Response:
    page = page_of(request)
    found, total = await services(request).tokens.page(
        workspace=actor_of(request).workspace,
        revoked=flag(request, "revoked"),
        limit=page.limit,
        offset=page.offset,
    )
    return page_response("tokens", [to_json(token) for token in found], total, page)


async def revoke(request: Request) -> Response:
    core = services(request).access_tokens
    revoked = await core.revoke(request.path_params["ref"], actor_of(request))
    return ApiResponse({"revoked": revoked.id, "name": revoked.name})


ROUTES = [
    ScopedRoute("/tokens", create, scope="admin", methods=["POST"]),
    ScopedRoute("/tokens", index, scope="admin"),
    ScopedRoute("/tokens/{ref}", revoke, scope="admin", methods=["DELETE"]),
]
