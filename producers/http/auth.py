"""Access to the API: a request needs a known Host header (against DNS rebinding), and then a credential
(`producers/http/credentials.py`).

A web page in a browser on this machine can reach 127.0.0.1 under a host name of its own, but it
cannot choose the Host header, so such a request is refused. A refused request is answered before
its body is read, and its connection is closed. Only HTTP passes: a websocket is closed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.http.failed_auth_throttle import network_of
from infra.http.request_limits import Rate, RequestLimits
from infra.identity.audit_buffer import AuditEntry
from infra.ports.actor import Actor, acting_as
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from producers.http.browsers import OIDC, OIDC_CALLBACK, is_for_browsers, is_open_page
from producers.http.client_address import ClientAddresses
from producers.http.credentials import (
    CLOSING,
    KEY_SHA256,
    SETTING_KEYS,
    SEVERAL,
    UNAUTHORIZED,
    readers_of,
)
from producers.http.openai_errors import in_form_of
from producers.http.responses import problem, refusal_response
from producers.http.services import Services
from schemas.errors import QuotaExceeded

OPEN_PATHS = ("/healthz", "/readyz")
SIGNED_PATHS = "/webhooks/"
"""Requests below this path carry a signature instead of an API key."""

DEVICE_LIMITS = {
    "authorize": (Rate(per_minute=20), Rate(per_minute=600)),
    "token": (Rate(per_minute=120), Rate(per_minute=6000)),
}
"""The routes of a device login, which need no API key, and how many requests of each address and of all
together each of them answers in a minute."""

DEVICE_PATHS = {
    f"{prefix}/device/{route}": route
    for prefix in ("/api/v1", "/api/cli")
    for route in DEVICE_LIMITS
}

OIDC_LIMITS = {
    OIDC: (Rate(per_minute=60), Rate(per_minute=1200)),
    OIDC_CALLBACK: (Rate(per_minute=60), Rate(per_minute=1200)),
}
"""The same for the pages of a sign-in with the provider. Many people may have one address."""

LIMITED_PATHS = {**DEVICE_PATHS, **{path: path for path in OIDC_LIMITS}}

IS_AUDITED = "is_audited"
"""Whether the state of a request says that its page adds its own entry to the audit list."""

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
VISITOR = "visitor"
"""The actor of a page or a route that needs no API key."""

LONGEST_SUBJECT = 200

UNKNOWN_HOST = problem(
    421,
    "UNKNOWN_HOST",
    "the Host header does not name this server; set HEADRACE_URL or HEADRACE_PUBLIC_URL to the name by "
    "which it is reached",
    headers=CLOSING,
)
NUL_IN_ADDRESS = problem(
    400, "VALIDATION", "the address holds a NUL character; no name contains one", headers=CLOSING
)


def actor_of(request: Request) -> Actor:
    """The sender of a request: owner, workspace and scopes of its API key, and its address."""
    actor: Actor = request.state.actor
    return actor


async def is_still_valid(request: Request) -> bool:
    """Whether the API key of a request is still valid, for answers that last long. Raises
    TransientError while the keys cannot be read."""
    core, actor = request.app.state.services, actor_of(request)
    if actor.api_key in SETTING_KEYS:
        return True
    return bool(await core.recent_api_keys.is_valid(actor.api_key, key_sha256_of(request)))


def key_sha256_of(request: Request) -> bytes:
    """The SHA-256 of the API key of a request."""
    found: bytes = request.scope["state"][KEY_SHA256]
    return found


@dataclass(frozen=True, slots=True)
class Sender:
    """The actor of a request, or the response that refuses it; whether its address is a stranger's, and
    whether it is known by an API key."""

    found: Actor | Response
    is_stranger: bool = True
    is_known: bool = False


class Guard:
    """ASGI middleware that authenticates the sender before anything else runs, and adds every
    request with an API key, and every refused one, to the audit list."""

    def __init__(self, app: ASGIApp, *, services: Services) -> None:
        self._app = app
        self._services = services
        self._hosts = {*LOCAL_HOSTS, *services.settings.hosts}
        self._addresses = ClientAddresses(services.settings.trusted_proxies)
        self._readers, self._cookie = readers_of(services)
        self._open_limits = {
            route: RequestLimits(each=each, together=together)
            for route, (each, together) in {**DEVICE_LIMITS, **OIDC_LIMITS}.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, _never_sniffed(send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "only HTTP is served"})
        elif scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        address = self._addresses.of(scope, headers)
        if not self._known_host(headers.get("host", "")):
            sender = Sender(UNKNOWN_HOST)
        elif scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        else:
            sender = await self._find_sender(scope, headers, address)
        self._count(scope, is_refused=sender.is_stranger, is_known=sender.is_known)
        found = sender.found
        if isinstance(found, Response):
            self._record(scope, scope["path"], found.status_code, None, address)
            await in_form_of(scope["path"], found)(scope, receive, send)
            return
        over = await self._over_quota(found, scope["path"])
        if over is not None:
            self._record(scope, scope["path"], over.status_code, found, address)
            await in_form_of(scope["path"], over)(scope, receive, send)
            return
        await self._serve_actor(found, scope, receive, send)

    async def _over_quota(self, actor: Actor, path: str) -> Response | None:
        """Count a request to the API. Returns the response that refuses it when there were too many."""
        if route := LIMITED_PATHS.get(path):
            return self._over_open_limit(route, actor.address)
        if is_for_browsers(path) or path.startswith(SIGNED_PATHS):
            return None
        try:
            await self._services.quotas.count_request(actor)
        except QuotaExceeded as error:
            return refusal_response(error)
        except UNAVAILABLE_ERRORS:
            return None  # the answer to the request says so
        return None

    def _over_open_limit(self, route: str, address: str) -> Response | None:
        wait_s = self._open_limits[route].take_s(network_of(address))
        if not wait_s:
            return None
        message = f"too many logins from this address; try again in {math.ceil(wait_s)} seconds"
        return refusal_response(QuotaExceeded(message, retry_s=wait_s))

    def _count(self, scope: Scope, *, is_refused: bool, is_known: bool) -> None:
        """Count a refused request, or one with a valid API key, for the address of its connection.
        The addresses of trusted proxies are not counted, because behind them is everybody."""
        client = scope.get("client")
        if client is None or self._addresses.is_proxy(client[0]):
            return
        if is_refused:
            self._services.throttle.refuse(client[0])
        elif is_known:
            self._services.throttle.welcome(client[0])

    async def _serve_actor(self, actor: Actor, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer on behalf of an actor, and record its status."""
        state = scope.setdefault("state", {})
        state["actor"] = actor
        path, is_recorded = scope["path"], False

        async def watch(message: Message) -> None:
            nonlocal is_recorded
            if message["type"] == "http.response.start":
                is_recorded = True
                is_wrong = actor.api_key == VISITOR and message["status"] == 401
                self._count(scope, is_refused=is_wrong, is_known=False)
                self._record(scope, path, message["status"], actor, actor.address)
            await send(message)

        with acting_as(actor):
            try:
                await self._app(scope, receive, watch)
            except Exception:
                if not is_recorded:
                    self._record(scope, path, 500, actor, actor.address)
                raise

    async def _find_sender(self, scope: Scope, headers: Headers, address: str) -> "Sender":
        """The sender of a request, or the response that refuses it."""
        path = scope["path"]
        visitor = Actor(VISITOR, VISITOR, frozenset(), address=address)
        sender = Sender(visitor, is_stranger=False)
        if path.startswith(SIGNED_PATHS):
            found = Actor("webhook", "forge", frozenset(), address=address)
            sender = Sender(found, is_stranger=False)
        elif not (is_open_page(path) or path in DEVICE_PATHS):
            sender = await self._read_credential(scope, headers, address)
        if isinstance(sender.found, Actor) and (
            "\0" in path or b"%00" in scope.get("query_string", b"")
        ):
            return Sender(NUL_IN_ADDRESS, is_stranger=False)
        return sender

    async def _read_credential(self, scope: Scope, headers: Headers, address: str) -> "Sender":
        """The sender that the credential of a request names (`producers/http/credentials.py`)."""
        carried = [one for one in self._readers if one.is_carried(scope, headers)]
        if len(carried) > 1:
            return Sender(SEVERAL)
        if not carried and self._cookie.is_carried(scope, headers):
            carried = [self._cookie]
        if not carried:
            return Sender(UNAUTHORIZED)
        found = await carried[0].read(scope, headers, address)
        is_unknown = isinstance(found, Response) and found.status_code in (400, 401, 431)
        return Sender(
            found,
            is_known=isinstance(found, Actor),
            is_stranger=is_unknown and not carried[0].is_trusted,
        )

    def _known_host(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        return (name if colon and port.isdigit() else host.lower()) in self._hosts

    def _record(
        self, scope: Scope, path: str, status: int, actor: Actor | None, address: str
    ) -> None:
        """Add a request to the audit list. A delivery that was taken is not added, because the log has
        it, nor is a page that everybody may read."""
        refusals = (303, 400, 401, 403, 421, 431) if actor is None else (401, 403, 429)
        is_refused = status in refusals
        has_no_api_key = path.startswith(SIGNED_PATHS) or is_open_page(path)
        has_no_api_key |= path in DEVICE_PATHS and status >= 300
        if has_no_api_key and not is_refused:
            return
        state: Mapping[str, Any] = scope.get("state") or {}
        if state.get(IS_AUDITED):
            return
        now = self._services.clock.now()
        self._services.audit.add(
            AuditEntry(
                at=now,
                last_at=now,
                allowed=not is_refused,
                api_key=actor.api_key if actor is not None else None,
                owner=actor.owner if actor is not None else None,
                workspace=actor.workspace if actor is not None else None,
                organisation=actor.organisation if actor is not None else None,
                address=address,
                method=scope["method"][:20],
                route=state.get("route", ""),
                subject=_printable(path),
                status=status,
            )
        )


def _never_sniffed(send: Send) -> Send:
    """Send answers with a header by which browsers take the type that the answer names. Files of users
    are never taken for pages or scripts."""

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
        await send(message)

    return send_marked


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Tell a server that runs the lifespan protocol that there is nothing to start or stop."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_SUBJECT])
