"""Sessions of browsers: list the open ones of a user, end them all, and make a link that opens one."""

from dataclasses import asdict

from starlette.requests import Request

from infra.identity.sessions import CODE_S, Bearer, Holder, holder_of
from producers.http.auth import actor_of, key_sha256_of
from producers.http.requests import body_of
from producers.http.responses import ApiResponse, flag
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute


async def index(request: Request) -> ApiResponse:
    found = await services(request).sessions.list_open(_holder_in(request))
    return ApiResponse({"sessions": [asdict(one) for one in found], "total_count": len(found)})


async def end_all(request: Request) -> ApiResponse:
    return ApiResponse({"ended": await services(request).sessions.end_all(_holder_in(request))})


async def create_link(request: Request) -> ApiResponse:
    """A link that opens the dashboard once, for the API key of the request."""
    await body_of(request, ())
    core = services(request)
    bearer = Bearer(actor_of(request).api_key, key_sha256_of(request))
    code = await core.sessions.issue_code(bearer)
    url = f"{core.settings.public_url.rstrip('/')}/login?code={code}"
    return ApiResponse({"url": url, "expires_s": int(CODE_S)}, status_code=201)


def _holder_in(request: Request) -> Holder:
    """The user whose sessions a request is about: its own, `owner`, or with `all` everybody."""
    owner = request.query_params.get("owner") or None
    return holder_of(actor_of(request), owner=owner, is_everyone=flag(request, "all"))


ROUTES = [
    ScopedRoute("/sessions", index, scope="read"),
    ScopedRoute("/sessions", end_all, scope="read", methods=["DELETE"]),
    ScopedRoute("/login-links", create_link, scope="read", methods=["POST"]),
]
