"""Signing in with an OpenID Connect provider, and choosing one of the reader's organisations.

A sign-in belongs to the browser in which it began: a cookie holds a secret that the database knows by
its hash. So a page of another site cannot sign a reader in as somebody else.
"""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.identity.audit_buffer import AuditEntry
from infra.identity.sessions import Bearer
from producers.dashboard.forms import read_session_form
from producers.dashboard.pages.access.sign_in import open_session
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute, error_page
from producers.http.auth import IS_AUDITED, actor_of
from producers.http.browsers import OIDC, OIDC_CALLBACK, cookie_of, local_path
from producers.http.routes.runs import services
from schemas.errors import NotFound, Refused, TransientError

if TYPE_CHECKING:
    from infra.identity.oidc.sign_in import OidcSignIns

ORGANISATION = "/sign-in/organisation"
COOKIE = "headrace_sign_in"
METHOD = "OIDC"
"""The method of the entries of a sign-in in the audit list."""

COOKIE_S = 600
LONGEST_NEXT = 2000


async def begin(request: Request) -> Response:
    """Send the browser to the provider. The path to which it returns is one of this server."""
    following = local_path(request.query_params.get("next", "/"))
    attempt, url = await _sign_ins(request).begin(
        following if len(following) <= LONGEST_NEXT else "/"
    )
    answer = RedirectResponse(url, status_code=303)
    answer.set_cookie(
        _cookie_name(request),
        attempt.secret,
        max_age=COOKIE_S,
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="lax",
    )
    return answer


async def end(request: Request) -> Response:
    """Open the session of a person who comes back from the provider."""
    from infra.identity.oidc.accounts import (
        NoMembership,
    )  # its libraries are loaded when they are needed
    from infra.identity.oidc.sign_in import ReturnedBrowser

    query = request.query_params
    returned = ReturnedBrowser(
        state=query.get("state", ""),
        secret=cookie_of(request.headers, name=_cookie_name(request)),
        code=query.get("code"),
        error=query.get("error"),
        issuer=query.get("iss"),
    )
    request.scope.setdefault("state", {})[IS_AUDITED] = True
    try:
        done, following = await _sign_ins(request).end(returned)
    except NoMembership as refusal:
        for change in refusal.changes:
            _note(request, change.words, owner=refusal.person, organisation=change.organisation)
        return _refusal_page(request, refusal.status, refusal.message, owner=refusal.person)
    except Refused as refusal:
        return _refusal_page(request, refusal.status, refusal.message)
    except TransientError as error:
        return _refusal_page(request, 503, str(error))
    for change in done.changes:
        _note(request, change.words, owner=done.person.id, organisation=change.organisation)
    _note(
        request,
        f"{done.person.id} signed in",
        owner=done.person.id,
        organisation=done.organisation,
        api_key=done.bearer.api_key,
    )
    if len(done.memberships) > 1 and following == "/":
        following = ORGANISATION
    answer = await open_session(request, done.bearer, following)
    _forget_cookie(request, answer)
    return answer


async def organisations(request: Request) -> Response:
    """The organisations of the reader, each with a button."""
    actor = actor_of(request)
    found = await _sign_ins(request).accounts.memberships_of(actor.person_id or "")
    return html(request, "organisations.html", {"memberships": found})


async def switch(request: Request) -> Response:
    """Go on in another organisation: the session ends, and one with that organisation's rights opens."""
    fields, sign_ins = await read_session_form(request), _sign_ins(request)
    bearer: Bearer = await sign_ins.accounts.switch(
        actor_of(request), fields.get("organisation", "")
    )
    return await open_session(request, bearer, "/")


def _refusal_page(
    request: Request, status: int, message: str, *, owner: str | None = None
) -> Response:
    """The page of a sign-in that opens no session, with its entry in the audit list."""
    _note(request, f"refused: {message}", status=status, owner=owner)
    answer = error_page(request, status, message)
    _forget_cookie(request, answer)
    return answer


def _note(
    request: Request,
    words: str,
    *,
    status: int = 303,
    owner: str | None = None,
    organisation: str | None = None,
    api_key: str | None = None,
) -> None:
    """Add an entry to the audit list."""
    core, visitor = services(request), actor_of(request)
    now = core.clock.now()
    core.audit.add(
        AuditEntry(
            at=now,
            last_at=now,
            allowed=status < 400,
            api_key=api_key,
            owner=owner,
            workspace=None,
            address=visitor.address,
            method=METHOD,
            route=OIDC_CALLBACK,
            subject="".join(c if c.isprintable() else "?" for c in words[:200]),
            status=status,
            organisation=organisation,
        )
    )


def _sign_ins(request: Request) -> "OidcSignIns":
    found = services(request).oidc
    if found is None:
        raise NotFound(
            "this installation has no sign-in provider; sign in with an API key at /login"
        )
    return found


def _forget_cookie(request: Request, answer: Response) -> None:
    answer.delete_cookie(_cookie_name(request), path="/", secure=_is_secure(request), httponly=True)


def _cookie_name(request: Request) -> str:
    return f"__Host-{COOKIE}" if _is_secure(request) else COOKIE


def _is_secure(request: Request) -> bool:
    return services(request).settings.public_url.startswith("https:")


ROUTES = [
    PageRoute(OIDC, begin, scope="open"),
    PageRoute(OIDC_CALLBACK, end, scope="open"),
    PageRoute(ORGANISATION, organisations, scope="read"),
    PageRoute(ORGANISATION, switch, scope="read", methods=["POST"]),
]
