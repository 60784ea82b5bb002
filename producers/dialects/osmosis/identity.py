"""The sender of the client's requests: `auth whoami` and `auth login` verify their API key here."""

from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from infra.ports.actor import Actor
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, answer, services
from producers.dialects.osmosis.scope import has_scope, route, workspace_of
from producers.http.auth import actor_of
from producers.http.credentials import SETTING_KEYS
from schemas.errors import NotFound


class UserWire(Wire):
    id: str
    email: str
    name: str


class VerifiedWorkspace(Wire):
    id: str
    name: str
    role: str


class Verified(Wire):
    """The owner of an API key. Without `token_id` the client asks for no revocation when it logs
    out."""

    user: UserWire
    expires_at: datetime | None
    token_id: str | None
    workspace: VerifiedWorkspace | None


async def verify(request: Request) -> Response:
    """Return who owns the API key, and which workspace the request names."""
    actor = actor_of(request)
    workspace = await workspace_of(request) if has_scope(request) else None
    return answer(
        Verified(
            user=user_of(actor),
            expires_at=actor.expires_at,
            token_id=None if actor.api_key in SETTING_KEYS else actor.api_key,
            workspace=None if workspace is None else _workspace_wire(actor, workspace),
        )
    )


def user_of(actor: Actor) -> UserWire:
    """The user that an API key acts for. A key without a person has its owner's name, also in the
    place of an e-mail address, which the client requires."""
    return UserWire(id=actor.owner, email=actor.owner, name=actor.owner)


def role_of(actor: Actor) -> str:
    """The role of the sender in a workspace: owner, member or viewer."""
    if actor.may("admin"):
        return "owner"
    return "member" if actor.may("submit") or actor.may("control") else "viewer"


def _workspace_wire(actor: Actor, workspace: Workspace) -> VerifiedWorkspace:
    return VerifiedWorkspace(id=workspace.id, name=workspace.name, role=role_of(actor))


async def revoke(request: Request) -> Response:
    """Revoke the API key that sends the request. The ids of other keys are unknown here."""
    actor, ref = actor_of(request), request.path_params["ref"]
    if ref != actor.api_key or ref in SETTING_KEYS:
        raise NotFound(
            f"{ref[:80]!r} is not the id of the API key that you send; `headrace key revoke` "
            "revokes others"
        )
    await services(request).api_key_issuer.revoke(ref, actor)
    return Response(status_code=204)


ROUTES = [
    route("/verify", verify, scope="read"),
    route("/tokens/{ref}", revoke, scope="read", methods=("DELETE",)),
]
