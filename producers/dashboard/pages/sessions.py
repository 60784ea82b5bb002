"""The open sessions of the reader, and the button that ends them all."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.access.sessions import holder_of, session_id
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.browsers import cookie_name, cookie_of
from producers.http.routes.runs import services
from producers.http.routes.sessions import index


async def show(request: Request) -> Response:
    core = services(request)
    cookie = cookie_of(request.headers, name=cookie_name(core.settings.public_url))
    found = await core.sessions.list_open(holder_of(actor_of(request)))
    return html(request, "sessions.html", {"sessions": found, "here": session_id(cookie)})


async def end_all(request: Request) -> Response:
    """Sign the reader out everywhere, here too."""
    await read_session_form(request)
    await services(request).sessions.end_all(holder_of(actor_of(request)))
    return RedirectResponse("/login", status_code=303)


ROUTES = [
    PageRoute("/sessions", show, scope="read"),
    PageRoute("/sessions.json", index, scope="read"),
    PageRoute("/sessions/end", end_all, scope="read", methods=["POST"]),
]
