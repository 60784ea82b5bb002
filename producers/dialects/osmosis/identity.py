"""The sender of the client's requests: `auth login`, `auth whoami` and `auth logout`."""

from datetime import datetime

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from infra.identity.people import Person
from infra.ports.actor import Actor
from producers.core.device_login import (
    DeviceLoginDenied,
    DeviceLoginExpired,
    DeviceLoginPending,
    SlowDown,
)
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.errors import ClientRefused
from producers.dialects.osmosis.requests import Wire, answer, read_body, services
from producers.dialects.osmosis.scope import has_scope, route, workspace_of
from producers.http.auth import actor_of
from producers.http.credentials import SETTING_KEYS
from schemas.errors import NotFound

POLL_ERRORS = (DeviceLoginPending, SlowDown, DeviceLoginExpired, DeviceLoginDenied)


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


class BeginLogin(Wire):
    device_name: str = Field(default="unknown", alias="deviceName")


class BegunLoginWire(Wire):
    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str
    expires_in: int
    interval: int


class PollLogin(Wire):
    device_code: str


class IssuedLoginWire(Wire):
    token: str
    token_id: str
    user: UserWire
    expires_at: datetime | None


async def verify(request: Request) -> Response:
    """Return who owns the API key, and which workspace the request names."""
    actor = actor_of(request)
    workspace = await workspace_of(request) if has_scope(request) else None
    return answer(
        Verified(
            user=await _user_of(request, actor),
            expires_at=actor.expires_at,
            token_id=None if actor.api_key in SETTING_KEYS else actor.api_key,
            workspace=None if workspace is None else _workspace_wire(actor, workspace),
        )
    )


async def _user_of(request: Request, actor: Actor) -> UserWire:
    """The user that an API key acts for. A key without a person has its owner's name, also in the
    place of an e-mail address, which the client requires."""
    if actor.person_id is None:
        return UserWire(id=actor.owner, email=actor.owner, name=actor.owner)
    return _user_wire(await services(request).people.find(actor.person_id))


def _user_wire(person: Person) -> UserWire:
    return UserWire(id=person.id, email=person.email, name=person.name)


def role_of(actor: Actor) -> str:
    """The role of the sender in a workspace: owner, member or viewer."""
    if actor.role is not None:
        return actor.role
    if actor.may("admin"):
        return "owner"
    return "member" if actor.may("submit") or actor.may("control") else "viewer"


def _workspace_wire(actor: Actor, workspace: Workspace) -> VerifiedWorkspace:
    return VerifiedWorkspace(id=workspace.id, name=workspace.name, role=role_of(actor))


async def revoke(request: Request) -> Response:
    """Revoke the API key that sends the request. The ids of other keys are unknown here."""
    actor, ref = actor_of(request), request.path_params["ref"]
    if ref != actor.api_key:
        raise NotFound(
            f"{ref[:80]!r} is not the id of the API key that you send; `headrace key revoke` "
            "revokes others"
        )
    await services(request).api_key_issuer.revoke_own(actor)
    return Response(status_code=204)


async def authorize(request: Request) -> Response:
    """Begin a login without an API key: a person approves it in a browser."""
    body = await read_body(request, BeginLogin)
    core = services(request)
    begun = await core.device_logins.begin(body.device_name, actor_of(request).address)
    page = f"{core.settings.public_url}{begun.verification_path}"
    return answer(
        BegunLoginWire(
            device_code=begun.device_code,
            user_code=begun.user_code,
            verification_uri=page,
            verification_uri_complete=f"{page}?code={begun.user_code}",
            expires_in=begun.expires_in_s,
            interval=begun.interval_s,
        )
    )


async def poll(request: Request) -> Response:
    """Return the API key of a login that was approved, once. Until then the answer is an error in the
    form of RFC 8628, whose code is the text itself."""
    body = await read_body(request, PollLogin)
    try:
        issued = await services(request).device_logins.poll(body.device_code)
    except POLL_ERRORS as error:
        code = error.code.lower()
        raise ClientRefused(400, code, code, fields={"error_description": error.message}) from error
    return answer(
        IssuedLoginWire(
            token=issued.secret,
            token_id=issued.api_key.id,
            user=_user_wire(issued.person),
            expires_at=issued.api_key.expires_at,
        )
    )


ROUTES = [
    route("/verify", verify, scope="any"),
    route("/tokens/{ref}", revoke, scope="any", methods=("DELETE",)),
    route("/device/authorize", authorize, scope="open", methods=("POST",)),
    route("/device/token", poll, scope="open", methods=("POST",)),
]
