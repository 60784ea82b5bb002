"""Secrets of a workspace and of a person. The client calls the latter `user` on the wire and "personal"
on its command line."""

from datetime import datetime
from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from infra.ports.secrets import StoredSecret
from producers.core.secrets import OwnedBy
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import (
    Wire,
    answer,
    page_answer,
    page_of,
    read_body,
    services,
)
from producers.dialects.osmosis.scope import in_workspace, route
from producers.http.auth import actor_of
from schemas.errors import InvalidConfig, Issue
from schemas.secrets.rules import SecretScope
from schemas.secrets.secret_value import SecretValue

WireScope = Literal["workspace", "user"]

SCOPES: dict[WireScope, SecretScope] = {"workspace": "workspace", "user": "personal"}
"""The scopes of secrets by their names on the wire."""

WIRE_SCOPES: dict[SecretScope, WireScope] = {ours: wire for wire, ours in SCOPES.items()}
LISTS: dict[str, tuple[SecretScope, ...]] = {
    "all": ("workspace", "personal"),
    "workspace": ("workspace",),
    "user": ("personal",),
}


class PutSecret(Wire):
    name: str
    value: str = Field(repr=False)
    scope: WireScope


class DeleteSecret(Wire):
    name: str
    scope: WireScope


class SecretWire(Wire):
    """A secret without its value."""

    id: str
    name: str
    scope: WireScope
    created_at: datetime
    updated_at: datetime
    creator_name: str
    updater_name: str
    platform_url: str | None = None


class Deleted(Wire):
    name: str
    scope: WireScope


async def index(request: Request, workspace: Workspace) -> Response:
    """Return a page of the names of secrets: those of the workspace, of the person, or of both."""
    page = page_of(request)
    wanted = request.query_params.get("scope") or "all"
    if wanted not in LISTS:
        message = f"must be one of {', '.join(LISTS)}, got {wanted[:20]!r}"
        raise InvalidConfig(f"scope {message}", issues=(Issue("scope", message),))
    found, _ = await services(request).secrets.secrets_of(actor_of(request).person, [workspace])
    chosen = [one for one in found if one.owner.scope in LISTS[wanted]]
    rows = [_secret(one) for one in chosen[page.offset : page.offset + page.limit]]
    return page_answer("environment_secrets", rows, len(chosen), page, platform_url=None)


async def put(request: Request, workspace: Workspace) -> Response:
    """Store a secret, or replace its value."""
    body = await read_body(request, PutSecret)
    stored, is_new = await services(request).secrets.put_secret(
        _owned_by(request, workspace, body.scope),
        body.name,
        SecretValue(body.value),
        author=actor_of(request).name,
    )
    return answer(_secret(stored), status=201 if is_new else 200)


async def delete(request: Request, workspace: Workspace) -> Response:
    """Delete a secret."""
    body = await read_body(request, DeleteSecret)
    await services(request).secrets.delete(_owned_by(request, workspace, body.scope), body.name)
    return answer(Deleted(name=body.name, scope=body.scope))


def _owned_by(request: Request, workspace: Workspace, scope: WireScope) -> OwnedBy:
    ours = SCOPES[scope]
    return OwnedBy(actor_of(request).person, ours, workspace.id if ours == "workspace" else None)


def _secret(secret: StoredSecret) -> SecretWire:
    scope = WIRE_SCOPES[secret.owner.scope]
    return SecretWire(
        id=f"{scope}/{secret.name}",
        name=secret.name,
        scope=scope,
        created_at=secret.created_at,
        updated_at=secret.updated_at,
        creator_name=secret.created_by.partition("/")[0],
        updater_name=secret.updated_by.partition("/")[0],
    )


ROUTES = [
    route("/environment-secrets", in_workspace(index), scope="read"),
    route("/environment-secrets", in_workspace(put), scope="control", methods=("POST",)),
    route("/environment-secrets", in_workspace(delete), scope="control", methods=("DELETE",)),
]
