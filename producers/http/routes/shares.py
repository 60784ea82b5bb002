"""Links that show a run to everyone who has them: make, list and revoke them."""

from collections.abc import Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.shares import DEFAULT_DAYS, MOST_DAYS
from producers.http.auth import actor_of
from producers.http.browsers import SHARED
from producers.http.requests import body_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import find_run, services
from producers.http.routing import ScopedRoute
from schemas.errors import NotFound


async def share(request: Request) -> Response:
    """Make a link that shows a run, and nothing else, to everyone who has it."""
    body = await body_of(request, ("days",))
    days = body.number("days", default=DEFAULT_DAYS, least=1, most=MOST_DAYS)
    return ApiResponse(await new_share(request, int(days)), status_code=201)


async def new_share(request: Request, days: int) -> Mapping[str, object]:
    """A new link to the run that the path names. Raises NotFound and Conflict."""
    core = services(request)
    run, _ = await find_run(request)
    made = await core.shares.create(run["id"], days=days, by=actor_of(request).name)
    url = f"{core.settings.public_url.rstrip('/')}{SHARED}?key={made.key}"
    return {"id": made.id, "url": url, "expires_at": made.expires_at}


async def index_shares(request: Request) -> Response:
    """The links of a run that are open, without their keys."""
    run, _ = await find_run(request)
    found = await services(request).shares.of_run(run["id"])
    return ApiResponse({"shares": [asdict(one) for one in found]})


async def revoke_share(request: Request) -> Response:
    return ApiResponse({"revoked": await close_share(request)})


async def close_share(request: Request) -> str:
    """Revoke the link that the path names. Returns its id. Raises NotFound."""
    run, _ = await find_run(request)
    name = request.path_params["share"]
    if not await services(request).shares.revoke(run["id"], name):
        raise NotFound(
            f"run {run['name']} has no open link {name[:40]!r}; "
            f"`headrace train share {run['name']} --list` shows them"
        )
    return str(name)


ROUTES = [
    ScopedRoute("/runs/{ref}/shares", share, scope="control", methods=["POST"]),
    ScopedRoute("/runs/{ref}/shares", index_shares, scope="control"),
    ScopedRoute("/runs/{ref}/shares/{share}", revoke_share, scope="control", methods=["DELETE"]),
]
