"""The page on which a person approves or denies that a program signs in for them."""

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.device_logins import WaitingLogin
from producers.core.device_login import PAGE
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.routes.runs import services
from schemas.errors import Refused


async def show(request: Request) -> Response:
    """The form that takes a code, or the login that waits under the code of the address. To open the
    page approves nothing."""
    code = request.query_params.get("code", "").strip()
    if not code:
        return _page(request)
    return await _show_login(request, code)


async def decide(request: Request) -> Response:
    """Approve or deny the login under a code, or show it first."""
    fields = await read_session_form(request)
    code, decision = fields.get("code", "").strip(), fields.get("decision", "")
    logins, actor = services(request).device_logins, actor_of(request)
    if decision not in ("approve", "deny"):
        return await _show_login(request, code) if code else _page(request)
    try:
        if decision == "approve":
            done = f"{await logins.approve(code, actor)} is signed in. You can close this page."
        else:
            done = f"{await logins.deny(code, actor)} was denied."
    except Refused as error:
        return _page(request, problem=error.message, status=error.status)
    return _page(request, done=done)


async def _show_login(request: Request, code: str) -> Response:
    try:
        found = await services(request).device_logins.find(code, actor_of(request))
    except Refused as error:
        return _page(request, problem=error.message, status=error.status)
    return _page(request, code=code, login=found)


def _page(
    request: Request,
    *,
    code: str = "",
    login: WaitingLogin | None = None,
    done: str = "",
    problem: str = "",
    status: int = 200,
) -> Response:
    values = {"code": code, "login": login, "done": done, "problem": problem}
    return html(request, "device.html", values, status=status)


ROUTES = [
    PageRoute(PAGE, show, scope="read"),
    PageRoute(PAGE, decide, scope="read", methods=["POST"]),
]
