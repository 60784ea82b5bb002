"""Access to the API: a request needs a known Host header (against DNS rebinding), and then an API
key.

A web page in a browser on this machine can reach 127.0.0.1 under a host name of its own, but it
cannot choose the Host header, so such a request is refused. A refused request is answered before
its body is read, and its connection is closed. Only HTTP passes: a websocket is closed.
"""

import hmac
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.identity.api_key_format import digest
from infra.identity.api_keys import ApiKey
from infra.identity.audit_buffer import AuditEntry
from infra.identity.sessions import Bearer
from infra.ports.actor import ROOT, ROOT_OWNER, Actor, acting_as
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from producers.http.browsers import (
    FOREIGN_ORIGIN,
    bearer_of,
    comes_from_here,
    cookie_name,
    cookie_of,
    is_for_browsers,
    is_open_page,
    sign_in_response,
)
from producers.http.client_address import ClientAddresses
from producers.http.openai_errors import in_form_of
from producers.http.responses import problem, refusal_response, unavailable_response
from producers.http.services import Services
from schemas.errors import QuotaExceeded, TransientError

OPEN_PATHS = ("/healthz", "/readyz")
SIGNED_PATHS = "/webhooks/"
"""Requests below this path carry a signature instead of an API key."""

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
ROOT_KEPT_S = 1.0
METRICS = "metrics"
VISITOR = "visitor"
"""The actor of a page that needs no session."""

SETTING_KEYS = (ROOT, METRICS)
"""The ids of API keys that are settings and not rows."""

LONGEST_SUBJECT = 200

CLOSING = {"Connection": "close"}
CHALLENGE = {"WWW-Authenticate": "Bearer", **CLOSING}
UNKNOWN_HOST = problem(
    421,
    "UNKNOWN_HOST",
    "the Host header does not name this server; set HEADRACE_URL or HEADRACE_PUBLIC_URL to the name by "
    "which it is reached",
    headers=CLOSING,
)
UNAUTHORIZED = problem(
    401,
    "UNAUTHORIZED",
    "send `Authorization: Bearer API_KEY`; the API key is in $HEADRACE_HOME/token, or is one that "
    "`headrace key create` made and that is still valid",
    headers=CHALLENGE,
)
UNKNOWN_KEY = problem(
    401,
    "UNAUTHORIZED",
    "the API key that was sent is not known; send the one in $HEADRACE_HOME/token of this server, or "
    "one that `headrace key create` made",
    headers=CHALLENGE,
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
    bearer = bearer_of(request.scope["state"])
    sha256 = digest(_api_key_in(request.headers)) if bearer is None else bearer.sha256
    return bool(await core.recent_api_keys.is_valid(actor.api_key, sha256))


class Guard:
    """ASGI middleware that authenticates the sender before anything else runs, and adds every
    request with an API key, and every refused one, to the audit list."""

    def __init__(self, app: ASGIApp, *, services: Services) -> None:
        self._app = app
        self._services = services
        self._hosts = {*LOCAL_HOSTS, *services.settings.hosts}
        self._addresses = ClientAddresses(services.settings.trusted_proxies)
        self._cookie = cookie_name(services.settings.public_url)
        self._root: str | None = None
        self._root_until = 0.0

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
            found: Actor | Response = UNKNOWN_HOST
        elif scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        else:
            found = await self._find_actor(scope, headers, address)
        has_api_key = not scope["path"].startswith(SIGNED_PATHS) and not is_open_page(scope["path"])
        self._count(
            scope,
            is_refused=isinstance(found, Response) and found.status_code in (401, 421),
            is_known=isinstance(found, Actor) and has_api_key,
        )
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
        if is_for_browsers(path) or path.startswith(SIGNED_PATHS):
            return None
        try:
            await self._services.quotas.count_request(actor)
        except QuotaExceeded as error:
            return refusal_response(error)
        except UNAVAILABLE_ERRORS:
            return None  # the answer to the request says so
        return None

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

    async def _find_actor(self, scope: Scope, headers: Headers, address: str) -> Actor | Response:
        """The sender of a request, or the response that refuses it."""
        if scope["path"].startswith(SIGNED_PATHS):
            found: Actor | Response = Actor("webhook", "forge", frozenset(), address=address)
        elif is_open_page(scope["path"]):
            found = Actor(VISITOR, VISITOR, frozenset(), address=address)
        elif "authorization" not in headers and is_for_browsers(scope["path"]):
            found = await self._actor_of_session(scope, headers, address)
        else:
            text = _api_key_in(headers)
            found = await self._actor_with(text, address) if text else UNAUTHORIZED
        if isinstance(found, Actor) and (
            "\0" in scope["path"] or b"%00" in scope.get("query_string", b"")
        ):
            return NUL_IN_ADDRESS
        return found

    async def _actor_with(self, text: str, address: str) -> Actor | Response:
        """The owner of an API key, or the response that refuses it. Keys of the settings are
        compared in constant time."""
        given = text.encode()
        root, metrics = self._root_key(), self._services.settings.metrics_key
        if root and hmac.compare_digest(given, root.encode()):
            return _root_actor(address)
        if metrics and hmac.compare_digest(given, metrics.encode()):
            return Actor(METRICS, "operator", frozenset({"metrics"}), address=address)
        try:
            api_key = await self._services.recent_api_keys.find(text)
        except TransientError as error:
            return unavailable_response(str(error))
        if api_key is None:
            return UNKNOWN_KEY
        if not api_key.is_valid(self._services.clock.now()):
            return _invalid(api_key)
        return _actor_of(api_key, address)

    async def _actor_of_session(
        self, scope: Scope, headers: Headers, address: str
    ) -> Actor | Response:
        """The owner of the API key that opened a browser's session, or the response that refuses the
        request."""
        try:
            bearer = await self._services.sessions.find_bearer(
                cookie_of(headers, name=self._cookie)
            )
            found = await self._actor_of_bearer(bearer, address) if bearer else None
        except TransientError as error:
            return unavailable_response(str(error))
        except UNAVAILABLE_ERRORS:
            return unavailable_response("the database does not answer now; try again")
        if found is None:
            return sign_in_response(scope)
        if not comes_from_here(scope, headers, public_url=self._services.settings.public_url):
            return FOREIGN_ORIGIN
        scope.setdefault("state", {})["bearer"] = bearer
        return found

    async def _actor_of_bearer(self, bearer: Bearer, address: str) -> Actor | None:
        root = self._root_key()
        if bearer.api_key == ROOT:
            is_root = root and hmac.compare_digest(bearer.sha256, digest(root))
            return _root_actor(address) if is_root else None
        api_key = await self._services.recent_api_keys.find_digest(bearer.api_key, bearer.sha256)
        if api_key is None or not api_key.is_valid(self._services.clock.now()):
            return None
        return _actor_of(api_key, address)

    def _root_key(self) -> str | None:
        now = self._services.clock.elapsed_s()
        if now >= self._root_until:
            self._root = self._services.settings.read_api_key()
            self._root_until = now + ROOT_KEPT_S
        return self._root

    def _known_host(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        return (name if colon and port.isdigit() else host.lower()) in self._hosts

    def _record(
        self, scope: Scope, path: str, status: int, actor: Actor | None, address: str
    ) -> None:
        """Add a request to the audit list. A delivery that was taken is not added, because the log has
        it, nor is a page that everybody may read."""
        refusals = (303, 400, 401, 403, 421) if actor is None else (401, 403, 429)
        is_refused = status in refusals
        has_no_api_key = path.startswith(SIGNED_PATHS) or is_open_page(path)
        if has_no_api_key and not is_refused:
            return
        state: Mapping[str, Any] = scope.get("state") or {}
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


def _root_actor(address: str) -> Actor:
    return Actor(ROOT, ROOT_OWNER, frozenset({"admin"}), address=address)


def _actor_of(api_key: ApiKey, address: str) -> Actor:
    return Actor(
        api_key.id,
        api_key.owner,
        api_key.effective_scopes,
        api_key.workspace,
        address,
        expires_at=api_key.expires_at,
        organisation=api_key.organisation,
        person_id=api_key.person,
        role=api_key.role,
    )


def _invalid(api_key: ApiKey) -> Response:
    """The refusal of an API key that is known but not valid. It says why, and what to do."""
    until = f"{api_key.expires_at:%Y-%m-%d %H:%M} UTC" if api_key.expires_at is not None else ""
    if api_key.revoked_at is not None:
        reason = "was revoked; make another one with `headrace key create`"
    elif api_key.has_lost_its_person:
        reason = (
            "belongs to a person who is not a member of its organisation any more; ask an owner for "
            "an invitation"
        )
    elif api_key.has_old_secret:
        reason = f"was rotated, and this secret of it was valid until {until}; use the new secret"
    else:
        reason = (
            f"expired at {until}; an administrator makes a new secret for it with "
            f"`headrace key rotate {api_key.name}`"
        )
    detail = f"the API key {api_key.prefix} {reason}"
    return problem(401, "UNAUTHORIZED", detail, headers=CHALLENGE)


def _api_key_in(headers: Headers) -> str:
    """The API key in the Authorization header of a request; empty without one."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_SUBJECT])
