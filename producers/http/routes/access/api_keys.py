"""API keys: create, list, rotate, revoke. The text of an API key is in the response that made it,
and nowhere else."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.api_keys import ApiKey
from infra.identity.issuing import LONGEST_OVERLAP_S, LONGEST_S, NEVER, OVERLAP_S, WantedApiKey
from producers.http.auth import actor_of
from producers.http.requests import JsonBody, body_of
from producers.http.responses import ApiResponse, flag, page_of, page_response
from producers.http.routes.access.organisations import names_of, organisation_id
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue

OLD_PATH = "/tokens"
"""The path before keys were called so. It is answered for one release."""

FIELDS = ("name", "scopes", "owner", "workspace", "organisation", "expires_s")


def to_json(api_key: ApiKey) -> Mapping[str, object]:
    """An API key as JSON, without anything of its secret."""
    return {
        "id": api_key.id,
        "name": api_key.name,
        "owner": api_key.owner,
        "prefix": api_key.prefix,
        "scopes": sorted(api_key.scopes),
        "workspace": api_key.workspace,
        "organisation": api_key.organisation,
        "person": api_key.person,
        "expires_at": api_key.expires_at,
        "created_at": api_key.created_at,
        "created_by": api_key.created_by,
        "rotated_at": api_key.rotated_at,
        "old_secret_until": api_key.old_until,
        "last_used_at": api_key.last_used_at,
        "revoked_at": api_key.revoked_at,
    }


async def create(request: Request) -> Response:
    body = await body_of(request, FIELDS)
    scopes = body.values.get("scopes", ["read"])
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        message = "must be a list of scopes"
        raise InvalidConfig(f"scopes {message}", issues=(Issue("scopes", message),))
    core, workspace = services(request), body.optional("workspace")
    organisation = await organisation_id(request, body.optional("organisation"))
    wanted = WantedApiKey(
        name=body.text("name"),
        scopes=[str(scope) for scope in scopes],
        owner=body.optional("owner"),
        workspace=None
        if workspace is None
        else (await core.workspaces.find_workspace(workspace, organisation=organisation)).id,
        organisation=organisation,
        expires_s=_lifetime_in(body),
    )
    made, issued = await core.api_key_issuer.create(wanted, actor_of(request))
    return ApiResponse({_field(request): to_json(made), "secret": issued.text}, status_code=201)


async def index(request: Request) -> Response:
    page = page_of(request)
    found, total = await services(request).api_keys.page(
        workspace=actor_of(request).workspace,
        organisation=actor_of(request).organisation,
        revoked=flag(request, "revoked"),
        limit=page.limit,
        offset=page.offset,
    )
    tenants = {(one.organisation, one.workspace) for one in found}
    names = {tenant: await names_of(request, *tenant) for tenant in tenants}
    rows = [{**to_json(one), **names[one.organisation, one.workspace]} for one in found]
    return page_response(f"{_field(request)}s", rows, total, page)


async def rotate(request: Request) -> Response:
    body = await body_of(request, ("overlap_s", "expires_s"))
    made, issued = await services(request).api_key_issuer.rotate(
        request.path_params["ref"],
        actor_of(request),
        overlap_s=body.number("overlap_s", default=OVERLAP_S, least=0, most=LONGEST_OVERLAP_S),
        expires_s=_lifetime_in(body),
    )
    return ApiResponse({_field(request): to_json(made), "secret": issued.text})


async def revoke(request: Request) -> Response:
    core = services(request).api_key_issuer
    revoked = await core.revoke(request.path_params["ref"], actor_of(request))
    return ApiResponse({"revoked": revoked.id, "name": revoked.name})


async def revoke_own(request: Request) -> Response:
    """Refuse the API key of this request from now on, which needs no scope."""
    revoked = await services(request).api_key_issuer.revoke_own(actor_of(request))
    return ApiResponse({"revoked": revoked.id, "name": revoked.name})


def _field(request: Request) -> str:
    """The name of an API key in an answer. Below the old path it is the old one."""
    return "token" if request.state.route.startswith(OLD_PATH) else "api_key"


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
    ScopedRoute("/api-keys/self", revoke_own, scope="any", methods=["DELETE"]),
    *(
        route
        for path in ("/api-keys", OLD_PATH)
        for route in (
            ScopedRoute(path, create, scope="admin", methods=["POST"]),
            ScopedRoute(path, index, scope="admin"),
            ScopedRoute(f"{path}/{{ref}}/rotate", rotate, scope="admin", methods=["POST"]),
            ScopedRoute(f"{path}/{{ref}}", revoke, scope="admin", methods=["DELETE"]),
        )
    ),
]
