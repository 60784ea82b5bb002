"""Signing in with an API key or a one-time code, and signing out."""

import asyncio
import hmac

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.identity.api_key_format import api_key_id, digest
from infra.identity.sessions import SESSION_S, Bearer
from infra.ports.actor import ROOT
from producers.dashboard.forms import ForeignForm, read_form, read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.browsers import comes_from_here, cookie_name, cookie_of, local_path
from producers.http.services import Services

WRONG = "This is not a valid API key, or it has expired. `headrace key list` shows the valid ones."
USED = "This link has been used, or it is older than ten minutes. Sign in with an API key."
REST_S = 0.5
"""How long a refused sign-in waits for its answer."""


async def show(request: Request) -> Response:
    """The form. With `code` in the query it is a button that uses the code up. The address alone opens
    no session, because a page of another site could lead a browser there, and its reader would then
    work in the session of somebody else. Programs that look at the links of a chat do not use it up
    either."""
    following = local_path(request.query_params.get("next", "/"))
    if code := request.query_params.get("code"):
        bearer = await _services(request).sessions.find_code(code)
        if bearer is not None:
            return await _offer(request, code, bearer, following)
        return await _form(request, following, USED, status=401)
    return await _form(request, following)


async def sign_in(request: Request) -> Response:
    """Open a session. A page of another site may not do so: its reader would work in the session of
    somebody else."""
    public_url = _services(request).settings.public_url
    if not comes_from_here(request.scope, request.headers, public_url=public_url):
        raise ForeignForm("the form does not come from a page of this server; open /login here")
    fields = await read_form(request)
    following = local_path(fields.get("next", "/"))
    if code := fields.get("code"):
        bearer = await _services(request).sessions.redeem_code(code)
        if bearer is None:
            return await _form(request, following, USED, status=401)
        return await open_session(request, bearer, following)
    bearer = await _bearer_with(_services(request), fields.get("api_key", "").strip())
    if bearer is None:
        await asyncio.sleep(REST_S)
        return await _form(request, following, WRONG, status=401)
    return await open_session(request, bearer, following)


async def sign_out(request: Request) -> Response:
    await read_session_form(request)
    services = _services(request)
    await services.sessions.end(_cookie_of(request))
    if services.oidc is not None:
        await services.oidc.accounts.end(actor_of(request).api_key)
    answer = RedirectResponse("/login", status_code=303)
    public_url = services.settings.public_url
    # A browser asked to delete a __Host- cookie without Secure keeps it.
    answer.delete_cookie(
        cookie_name(public_url), path="/", secure=public_url.startswith("https:"), httponly=True
    )
    return answer


async def _offer(request: Request, code: str, bearer: Bearer, following: str) -> Response:
    """The page of a link: who its session would be of, and whose session it would replace."""
    now = await signed_in_bearer(request)
    values = {
        "code": code,
        "next": following,
        "owner": await _owner_of(request, bearer),
        "now": await _owner_of(request, now) if now and now != bearer else None,
    }
    return html(request, "sign_in_link.html", values)


async def _owner_of(request: Request, bearer: Bearer) -> str:
    if bearer.api_key == ROOT:
        return "admin"
    found = await _services(request).recent_api_keys.find_digest(bearer.api_key, bearer.sha256)
    return found.owner if found is not None else "an API key that was removed"


async def _form(
    request: Request, following: str, error: str | None = None, *, status: int = 200
) -> Response:
    oidc = _services(request).settings.oidc
    values = {"next": following, "error": error, "provider": oidc and oidc.host}
    return html(request, "login.html", values, status=status)


async def _bearer_with(services: Services, text: str) -> Bearer | None:
    """The API key with this text; None when it is not valid."""
    root = services.settings.read_api_key()
    if root and hmac.compare_digest(text.encode(), root.encode()):
        return Bearer(ROOT, digest(root))
    found = await services.recent_api_keys.find(text)
    if found is None or not found.is_valid(services.clock.now()) or api_key_id(text) is None:
        return None
    return Bearer(found.id, found.sha256)


async def open_session(request: Request, bearer: Bearer, following: str) -> Response:
    """Open a session of an API key in a browser, and send it to a path of this server."""
    services = _services(request)
    cookie = await services.sessions.open(bearer)
    answer = RedirectResponse(following, status_code=303)
    set_session(answer, cookie, services.settings.public_url)
    return answer


def set_session(answer: Response, cookie: str, public_url: str) -> None:
    """Give a browser the cookie of a session with an answer."""
    answer.set_cookie(
        cookie_name(public_url),
        cookie,
        max_age=int(SESSION_S),
        path="/",
        secure=public_url.startswith("https:"),
        httponly=True,
        samesite="lax",
    )


async def signed_in_bearer(request: Request) -> Bearer | None:
    """The API key of the session of a browser at a page that needs none."""
    return await _services(request).sessions.find_bearer(_cookie_of(request))


def _cookie_of(request: Request) -> str:
    name = cookie_name(_services(request).settings.public_url)
    return cookie_of(request.headers, name=name)


def _services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


ROUTES = [
    PageRoute("/login", show, scope="open"),
    PageRoute("/login", sign_in, scope="open", methods=["POST"]),
    PageRoute("/logout", sign_out, scope="read", methods=["POST"]),
]
