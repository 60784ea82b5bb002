"""Secrets: set, list and delete. A value arrives in a JSON body only, and no answer holds one."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.ports.secrets import StoredSecret
from producers.core.secrets import OwnedBy, parse_secret_scope
from producers.http.auth import actor_of
from producers.http.requests import JsonBody, body_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue
from schemas.secrets.secret_value import SecretValue


async def index(request: Request) -> Response:
    workspace = request.query_params.get("workspace")
    core = services(request).secrets
    found, names = await core.all_secrets(actor_of(request).person, workspace)
    return ApiResponse(
        {"secrets": [_to_json(one, names) for one in found], "total_count": len(found)}
    )


async def put(request: Request) -> Response:
    body = await body_of(request, ("value", "scope", "workspace"))
    owned_by = OwnedBy(
        actor_of(request).person,
        parse_secret_scope(_once(request, body, "scope")),
        _once(request, body, "workspace"),
    )
    name = request.path_params["name"]
    stored, is_new = await services(request).secrets.put_secret(
        owned_by, name, _value_of(body), author=actor_of(request).name
    )
    return ApiResponse({"secret": _to_json(stored, {})}, status_code=201 if is_new else 200)


async def delete(request: Request) -> Response:
    query = request.query_params
    owned_by = OwnedBy(
        actor_of(request).person, parse_secret_scope(query.get("scope")), query.get("workspace")
    )
    name = request.path_params["name"]
    owner = await services(request).secrets.delete(owned_by, name)
    return ApiResponse({"deleted": {"name": name, "scope": owner.scope, "owner": owner.id}})


async def rotate_key(request: Request) -> Response:
    await body_of(request, ())
    done = await services(request).secrets.rewrap()
    return ApiResponse({"key": done.key, "secrets": done.secrets, "connections": done.connections})


def _once(request: Request, body: JsonBody, key: str) -> str | None:
    """The value of a key of the body, or of the query as in the other requests for secrets. Raises
    InvalidConfig when both have one and they differ."""
    in_body, in_query = body.optional(key), request.query_params.get(key) or None
    if None not in (in_body, in_query) and in_body != in_query:
        message = f"is {in_query!r:.80} in the query and {in_body!r:.80} in the body; give it once"
        raise InvalidConfig(f"{key} {message}", issues=(Issue(key, message),))
    return in_body or in_query


def _value_of(body: JsonBody) -> SecretValue:
    """Return the value of a request. Raises InvalidConfig, and never shows a part of it."""
    value = body.values.get("value")
    if not isinstance(value, str):
        message = "must be a string"
        raise InvalidConfig(f"value {message}", issues=(Issue("value", message),))
    return SecretValue(value)


def _to_json(secret: StoredSecret, workspaces: Mapping[str, str]) -> Mapping[str, object]:
    """A secret as JSON, without its value."""
    return {
        "name": secret.name,
        "scope": secret.owner.scope,
        "owner": secret.owner.id,
        "workspace": workspaces.get(secret.owner.id),
        "key": secret.key,
        "created_at": secret.created_at,
        "created_by": secret.created_by,
        "updated_at": secret.updated_at,
        "updated_by": secret.updated_by,
        "used_at": secret.used_at,
    }


ROUTES = [
    ScopedRoute("/secrets", index, scope="read"),
    ScopedRoute(
        "/secrets/rotate-key", rotate_key, scope="admin", reach="installation", methods=["POST"]
    ),
    ScopedRoute("/secrets/{name}", put, scope="control", methods=["PUT"]),
    ScopedRoute("/secrets/{name}", delete, scope="control", methods=["DELETE"]),
]
