"""Access to the API: a request needs a known Host header (against DNS rebinding), and then the bearer
token.

A web page in a browser on this machine can reach 127.0.0.1 under a host name of its own, but it cannot
choose the Host header, so such a request is refused. The token is compared in constant time.
"""

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.ports.actor import ROOT, Actor, acting_as
from infra.settings.settings import Settings
from producers.http.responses import problem

OPEN_PATHS = ("/healthz", "/readyz")
SIGNED_PATHS = "/webhooks/"
"""Requests below this path carry a signature instead of a token."""

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(SIGNED_PATHS)


def actor_of(request: Request) -> Actor:
    """The sender of a request: owner, workspace and scopes of its token, and its address."""
    actor: Actor = request.state.actor
    return actor


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


class Guard:
    """ASGI middleware that checks the Host header and the token before anything else runs."""

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._hosts = {*LOCAL_HOSTS, *settings.hosts}
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._known_host(headers.get("host", "")):
            refusal = problem(
                421,
                "UNKNOWN_HOST",
                "the Host header does not name this server; set HEADRACE_URL or "
                "HEADRACE_PUBLIC_URL to the name by which it is reached",
            )
        elif not _is_open(scope["path"]) and not self._has_token(headers):
            refusal = problem(
                401,
                "UNAUTHORIZED",
                "send `Authorization: Bearer TOKEN`; the token is in $HEADRACE_HOME/token",
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
        elif "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            refusal = problem(
                400, "VALIDATION", "the address holds a NUL character; no name contains one"
            )
        elif _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        else:
            actor = Actor(ROOT, "admin", frozenset({"admin"}), address=_address(scope))
            scope.setdefault("state", {})["actor"] = actor
            with acting_as(actor):
                await self._app(scope, receive, send)
            return
        await refusal(scope, receive, send)

    def _known_host(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        return (name if colon and port.isdigit() else host.lower()) in self._hosts

    def _has_token(self, headers: Headers) -> bool:
        token = self._settings.read_token()
        scheme, _, token_sent = headers.get("authorization", "").partition(" ")
        if not token or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(token_sent.strip().encode(), token.encode())
