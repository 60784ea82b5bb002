"""Tokens of the API: create, list, rotate, revoke. The text of a token is in the response that made it,
and nowhere else."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.access.issuing import LONGEST_OVERLAP_S, LONGEST_S, NEVER, OVERLAP_S, WantedToken
from infra.access.tokens import ApiToken
from producers.http.auth import actor_of
from producers.http.requests import JsonBody, body_of
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
        "rotated_at": token.rotated_at,
        "old_secret_until": token.old_until,
        "last_used_at": token.last_used_at,
        "revoked_at": token.revoked_at,
    }


async def create(request: Request) -> Response:
    body = await body_of(request, FIELDS)
    scopes = body.values.get("scopes", ["read"])
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        message = "must be a list of scopes"
        raise InvalidConfig(f"scopes {message}", issues=(Issue("scopes", message),))
    core, workspace = services(request), body.optional("workspace")
    wanted = WantedToken(
        name=body.text("name"),
        scopes=[str(scope) for scope in scopes],
        owner=body.optional("owner"),
        workspace=None if workspace is None else (await core.workspaces.find(workspace)).id,
        expires_s=_lifetime_in(body),
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


async def rotate(request: Request) -> Response:
    body = await body_of(request, ("overlap_s", "expires_s"))
    made, issued = await services(request).access_tokens.rotate(
        request.path_params["ref"],
        actor_of(request),
        overlap_s=body.number("overlap_s", default=OVERLAP_S, least=0, most=LONGEST_OVERLAP_S),
        expires_s=_lifetime_in(body),
    )
    return ApiResponse({"token": to_json(made), "secret": issued.text})


async def revoke(request: Request) -> Response:
    core = services(request).access_tokens
    revoked = await core.revoke(request.path_params["ref"], actor_of(request))
    return ApiResponse({"revoked": revoked.id, "name": revoked.name})


def _lifetime_in(body: JsonBody) -> float | None:
    """The seconds in `expires_s`, NEVER for "never", and None without it."""
    value = body.values.get("expires_s")
    if value is None:
        return None
    if isinstance(value, str):
        if value != "never":
            message = f'must be a number of seconds or "never", got {value[:40]!r}'
            raise InvalidConfig(f"expires_s {message}", issues=(Issue("expires_s", message),))
        return NEVER
    return body.number("expires_s", default=0, least=1, most=LONGEST_S)


ROUTES = [
    ScopedRoute("/tokens", create, scope="admin", methods=["POST"]),
    ScopedRoute("/tokens", index, scope="admin"),
    ScopedRoute("/tokens/{ref}/rotate", rotate, scope="admin", methods=["POST"]),
    ScopedRoute("/tokens/{ref}", revoke, scope="admin", methods=["DELETE"]),
]
