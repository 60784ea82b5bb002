"""Requests of browsers. They carry the cookie of a session in place of an API key.

A page of another site can make a browser send a request with the cookie. So the cookie counts only
for pages, never for the API, and a request that changes something must come from a page of this
server: its Origin is checked here, and the key of its form where the form is read.
"""

from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import Scope

from infra.identity.sessions import Bearer

COOKIE = "headrace_session"
HOST_COOKIE = f"__Host-{COOKIE}"
"""The name over https. A browser takes a cookie with this prefix only from this very host, so no other
host of the domain can set one. Plain http cannot set it, so the other name stays in use there."""

API_KEY_ONLY = ("/api/", "/v1/", "/metrics", "/webhooks/")
"""Paths below these are not for browsers."""

REPORTS = "/reports"
"""Where browsers report what a page tried and may not do."""

SHARED = "/shared"
"""The page that a share link opens. The key is in the query, because no log has queries."""

JOIN = "/join"
"""The page that the link of an invitation opens."""

OIDC = "/sign-in/oidc"
"""Where a sign-in with the provider begins."""

OIDC_CALLBACK = f"{OIDC}/callback"
"""Where the provider sends browsers back."""

OPEN_PAGES = ("/login", "/static/", REPORTS, SHARED, JOIN, OIDC)
SAFE_METHODS = ("GET", "HEAD")
PORTS = {"http": 80, "https": 443}
LONGEST_NEXT = 2000
LONGEST_COOKIES = 8192

FOREIGN_ORIGIN = PlainTextResponse(
    "This request does not come from a page of this server. Open the page here, and send it again.\n",
    status_code=403,
    headers={"Connection": "close"},
)


class PageReports:
    """Counts the reports of browsers about parts of pages that they refused."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


def is_for_browsers(path: str) -> bool:
    """Whether a path is a page and not a part of the API."""
    return not path.startswith(API_KEY_ONLY)


def is_open_page(path: str) -> bool:
    """Whether a page needs no session."""
    return path.startswith(OPEN_PAGES)


def cookie_name(public_url: str) -> str:
    """The name of the session's cookie on a server with this address."""
    return HOST_COOKIE if public_url.startswith("https:") else COOKIE


def cookie_of(headers: Headers, *, name: str) -> str:
    """The session's cookie (`name`, see `cookie_name`) of a request; empty without one."""
    text = headers.get("cookie", "")
    if len(text) > LONGEST_COOKIES:
        return ""
    # The reader in `http.cookies` finds none when a cookie that another program on this host made has a
    # form that it does not like.
    pairs = (part.strip().partition("=") for part in text.split(";"))
    return next((value for given, _, value in pairs if given == name), "")


def comes_from_here(scope: Scope, headers: Headers, *, public_url: str) -> bool:
    """Whether a request may change something, or open a session: a browser says that a page of this
    server sent it. At the server's own address (`public_url`) only the scheme of that address counts,
    because over plain http anybody on the way can answer with a page under this host's name."""
    scheme, _, origin = headers.get("origin", "").lower().partition("://")
    is_ours = bool(origin) and origin == headers.get("host", "").lower() and scheme in PORTS
    public = urlsplit(public_url.lower())
    if is_ours and _place(origin, public.scheme) == _place(public.netloc, public.scheme):
        is_ours = scheme == public.scheme
    return scope["method"] in SAFE_METHODS or is_ours


def _place(netloc: str, scheme: str) -> tuple[str | None, int | None]:
    """The host and port of an address; no host if it is none."""
    try:
        parts = urlsplit(f"//{netloc}")
        return parts.hostname, parts.port or PORTS.get(scheme)
    except ValueError:
        return None, None


def sign_in_response(scope: Scope) -> Response:
    """The response to a request without a session. A browser that asked for a page is sent to the
    sign-in page, and from there back."""
    if scope["method"] not in SAFE_METHODS:
        return PlainTextResponse(
            "Your session has ended. Sign in again in another tab, and then go back and send the form "
            "once more.\n",
            status_code=401,
            headers={"Connection": "close"},
        )
    wanted = scope["path"]
    if query := scope.get("query_string", b"").decode("latin-1"):
        wanted = f"{wanted}?{query}"
    following = f"?next={quote(wanted, safe='/')}" if 1 < len(wanted) <= LONGEST_NEXT else ""
    return RedirectResponse(f"/login{following}", status_code=303)


def local_path(text: str) -> str:
    """The path of this server that a request wants to be sent to; `/` when it would leave the server."""
    is_local = text.startswith("/") and not text.startswith("//")
    return text if is_local and text.isprintable() and "\\" not in text else "/"


def bearer_of(state: dict[str, object]) -> Bearer | None:
    """The API key of the session of a request; None when the request has no session."""
    found = state.get("bearer")
    return found if isinstance(found, Bearer) else None
