"""`POST /login-links`: a link that opens the dashboard once, for the token of the request."""

from starlette.requests import Request
from starlette.responses import Response

from infra.access.sessions import CODE_S, Bearer
from infra.access.token_format import digest
from producers.http.auth import actor_of
from producers.http.requests import body_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute


async def create(request: Request) -> Response:
    await body_of(request, ())
    core = services(request)
    text = request.headers["authorization"].partition(" ")[2].strip()
    code = await core.sessions.issue_code(Bearer(actor_of(request).token, digest(text)))
    url = f"{core.settings.public_url.rstrip('/')}/login?code={code}"
    return ApiResponse({"url": url, "expires_s": int(CODE_S)}, status_code=201)


ROUTES = [ScopedRoute("/login-links", create, scope="read", methods=["POST"])]
