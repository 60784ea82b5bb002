"""Signing a program in with a code that a person approves in a browser, and who a request comes from."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.people import Person
from producers.core.device_login import BegunLogin
from producers.http.auth import actor_of
from producers.http.requests import body_of
from producers.http.responses import ApiResponse
from producers.http.routes.access import api_keys
from producers.http.routes.access.organisations import names_of
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute


def person_to_json(person: Person) -> Mapping[str, object]:
    """A person as JSON."""
    return {"id": person.id, "name": person.name, "email": person.email}


def begun_to_json(begun: BegunLogin, public_url: str) -> Mapping[str, object]:
    """A login that waits, as RFC 8628 names its parts."""
    page = f"{public_url.rstrip('/')}{begun.verification_path}"
    return {
        "device_code": begun.device_code,
        "user_code": begun.user_code,
        "verification_uri": page,
        "verification_uri_complete": f"{page}?code={begun.user_code}",
        "expires_in": begun.expires_in_s,
        "interval": begun.interval_s,
    }


async def authorize(request: Request) -> Response:
    body = await body_of(request, ("device_name",))
    core = services(request)
    begun = await core.device_logins.begin(body.text("device_name"), actor_of(request).address)
    return ApiResponse(begun_to_json(begun, core.settings.public_url))


async def token(request: Request) -> Response:
    body = await body_of(request, ("device_code",))
    issued = await services(request).device_logins.poll(body.text("device_code"))
    return ApiResponse(
        {
            "api_key": api_keys.to_json(issued.api_key),
            "secret": issued.secret,
            "person": person_to_json(issued.person),
        }
    )


async def whoami(request: Request) -> Response:
    core, actor = services(request), actor_of(request)
    person = await core.people.find(actor.person_id) if actor.person_id else None
    return ApiResponse(
        {
            "person": None if person is None else person_to_json(person),
            "owner": actor.owner,
            "organisation": actor.organisation,
            "role": actor.role,
            "workspace": actor.workspace,
            **await names_of(request, actor.organisation, actor.workspace),
            "api_key": {
                "id": actor.api_key,
                "scopes": sorted(actor.scopes),
                "expires_at": actor.expires_at,
            },
        }
    )


ROUTES = [
    ScopedRoute("/device/authorize", authorize, scope="open", methods=["POST"]),
    ScopedRoute("/device/token", token, scope="open", methods=["POST"]),
    ScopedRoute("/whoami", whoami, scope="any"),
]
