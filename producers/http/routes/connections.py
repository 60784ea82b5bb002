"""Connections of workspaces to forges: connect, disconnect, and rotate the secret of the webhook.

Tokens and keys arrive in JSON bodies only. No answer holds one, except for the webhook's new secret.
"""

from collections.abc import Mapping
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from infra.repositories.forges.address import guess_forge
from infra.repositories.forges.api import git_user
from infra.repositories.git.credentials import (
    AppCredential,
    Credential,
    KeyCredential,
    TokenCredential,
)
from producers.core.connecting import ConnectRequest, HookState
from producers.core.workspaces import Workspace
from producers.http.requests import JsonBody, body_of, cause_of
from producers.http.responses import ApiResponse
from producers.http.routes.access.organisations import organisation_id
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue
from schemas.events import ForgeKind

OLD_FORGE = "provider"
"""The name of the field `forge` before. For one release it is accepted, and answered beside the new
one."""

FIELDS = ("url", "name", "forge", OLD_FORGE, "token", "deploy_key", "app", "organisation")
FORGES: tuple[ForgeKind, ...] = get_args(ForgeKind)
MOST_TOKEN = 4096


async def connect(request: Request) -> Response:
    body = await body_of(request, FIELDS)
    forge = _forge_of(body)
    wanted = ConnectRequest(
        url=body.text("url"),
        name=body.optional("name"),
        forge=forge,
        organisation=await organisation_id(request, body.optional("organisation")),
        credential=_credential_of(body, forge or guess_forge(body.text("url"))),
    )
    core = services(request).connecting
    cause = cause_of(request, "connect")
    workspace, found, hook = await core.connect(wanted, cause=cause)
    return _answer(workspace, found, hook, status=201)


async def disconnect(request: Request) -> Response:
    core = services(request).connecting
    cause = cause_of(request, "disconnect")
    workspace, deleted, problem = await core.disconnect(request.path_params["ref"], cause=cause)
    hook = {"deleted": deleted, "problem": problem}
    return ApiResponse({"workspace": _to_json(workspace), "hook": hook})


async def rotate_secret(request: Request) -> Response:
    body = await body_of(request, ("now",))
    core = services(request).connecting
    found = await core.rotate(request.path_params["ref"], now=body.flag("now"))
    return _answer(*found, status=200)


def _answer(workspace: Workspace, forge: ForgeKind, hook: HookState, *, status: int) -> Response:
    shown = {"url": hook.url, "secret": hook.secret, "made": hook.made, "problem": hook.problem}
    return ApiResponse(
        {"workspace": _to_json(workspace), "forge": forge, OLD_FORGE: forge, "hook": shown},
        status_code=status,
    )


def _to_json(workspace: Workspace) -> Mapping[str, object]:
    return {"id": workspace.id, "name": workspace.name, "url": workspace.url}


def _forge_of(body: JsonBody) -> ForgeKind | None:
    given = body.optional("forge") or body.optional(OLD_FORGE)
    for forge in FORGES:
        if given == forge:
            return forge
    if given is None:
        return None
    message = f"must be one of {', '.join(FORGES)}, got {given!r:.40}"
    raise InvalidConfig(f"forge {message}", issues=(Issue("forge", message),))


def _credential_of(body: JsonBody, forge: ForgeKind | None) -> Credential | None:
    """Return the credential of a request. Raises InvalidConfig, and never shows a part of it."""
    given = [name for name in ("token", "deploy_key", "app") if body.values.get(name) is not None]
    if len(given) > 1:
        raise InvalidConfig(f"the request has {' and '.join(given)}; give only one of them")
    if "token" in given:
        token = _secret(body.values["token"], "token")
        if (
            not token.isascii()
            or not token.isprintable()
            or " " in token
            or len(token) > MOST_TOKEN
        ):
            raise _invalid("token", "is not a token: it holds spaces or other unusual characters")
        return TokenCredential(git_user(forge), token)
    if "deploy_key" in given:
        return KeyCredential(_private_key(body.values["deploy_key"], "deploy_key"))
    if "app" in given:
        app = body.table("app")
        if not set(app) <= {"id", "private_key"}:
            raise _invalid("app", "has unknown fields; it has: id, private_key")
        number = str(app.get("id") or "")
        if not number.isascii() or not number.isalnum() or len(number) > 40:
            raise _invalid("app.id", "must be the number of the GitHub App")
        return AppCredential(number, _private_key(app.get("private_key"), "app.private_key"))
    return None


def _secret(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _invalid(name, "must be a string that is not empty")
    return value.strip()


def _private_key(value: object, name: str) -> str:
    """Return a private key, which ends with a line break as its tools require."""
    key = _secret(value, name)
    if not key.startswith("-----BEGIN ") or "PRIVATE KEY-----" not in key:
        raise _invalid(name, "is not a private key; give the file that begins with -----BEGIN")
    return key.replace("\r\n", "\n") + "\n"


def _invalid(name: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))


ROUTES = [
    ScopedRoute(
        "/workspaces/connect", connect, scope="admin", reach="organisation", methods=["POST"]
    ),
    ScopedRoute("/workspaces/{ref}/connection", disconnect, scope="admin", methods=["DELETE"]),
    ScopedRoute("/workspaces/{ref}/rotate-secret", rotate_secret, scope="admin", methods=["POST"]),
]
