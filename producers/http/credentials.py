"""The credentials of requests: what a request may carry to say on whose behalf it comes, and where.

| order | credential | read at |
|---|---|---|
| 1 | a signed URL, with its signature in its query | `/api/v1/transfers/` |
| 2 | `Authorization: Bearer API_KEY` | every other path |
| 3 | `X-API-Key: API_KEY` | `/api/v1/` |
| 4 | the cookie of a session | pages |

Below `/api/v1/transfers/` a request needs a signed URL. A browser sends its cookie with every request,
so a cookie beside a header is not read. Any other two credentials are refused, and so is a header that
is there twice or is too long: programs that send them are confused about who they are. A header at a
path where it is not read is ignored.

Whatever the credential, the actor has the same scopes, bindings, audit entries and limits. A signed URL
never counts as a stranger's request, because its signature is checked without a query of its own.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from infra.identity.api_key_format import digest
from infra.identity.api_keys import ApiKey
from infra.identity.sessions import Bearer
from infra.ports.actor import ROOT, ROOT_OWNER, Actor, ApiKeyScope
from infra.ports.signed_urls import SignatureCheck
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from producers.http.browsers import (
    FOREIGN_ORIGIN,
    comes_from_here,
    cookie_name,
    cookie_of,
    is_for_browsers,
    sign_in_response,
)
from producers.http.responses import problem, refusal_response, unavailable_response
from producers.http.services import Services
from schemas.errors import Refused, TransientError

TRANSFERS = "/api/v1/transfers/"
API = "/api/v1/"
AUTHORIZATION, API_KEY_HEADER = "authorization", "x-api-key"

LONGEST_HEADER = 1000
"""No credential in a header is longer."""

ROOT_KEPT_S = 1.0
METRICS = "metrics"

SETTING_KEYS = (ROOT, METRICS)
"""The ids of API keys that are settings and not rows."""

KEY_SHA256 = "key_sha256"
"""Where the state of a request has the SHA-256 of its API key."""

TRANSFERRING: Mapping[str, ApiKeyScope] = {"GET": "read", "HEAD": "read", "PUT": "submit"}
"""The scope that the request of a signed URL needs, by its method. The API key that asked for the URL
must still have it."""

CLOSING = {"Connection": "close"}
CHALLENGE = {"WWW-Authenticate": "Bearer", **CLOSING}
UNAUTHORIZED = problem(
    401,
    "UNAUTHORIZED",
    "send `Authorization: Bearer API_KEY`; the API key is in $HEADRACE_HOME/token, or is one that "
    "`headrace login` or `headrace key create` made and that is still valid",
    headers=CHALLENGE,
)
UNKNOWN_KEY = problem(
    401,
    "UNAUTHORIZED",
    "the API key that was sent is not known; send the one in $HEADRACE_HOME/token of this server, or "
    "one that `headrace key create` made",
    headers=CHALLENGE,
)
SEVERAL = problem(
    400,
    "SEVERAL_CREDENTIALS",
    "the request carries several credentials; send one: a signed URL, one header Authorization, or one "
    "header X-API-Key",
    headers=CLOSING,
)
TOO_LONG = problem(
    431,
    "CREDENTIAL_TOO_LONG",
    f"the header with the API key has more than {LONGEST_HEADER} characters; an API key has about 60, "
    "so send it alone",
    headers=CLOSING,
)
ENDED_URL = problem(
    403,
    "SIGNED_URL",
    "the API key that asked for this signed URL was revoked, has expired or has lost its scope; ask for "
    "a new URL with a valid API key",
    headers=CLOSING,
)


class Credentials:
    """Finds the actor of an API key."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._root: str | None = None
        self._root_until = 0.0

    async def actor_with(self, text: str, address: str) -> Actor | Response:
        """The actor of an API key, or the response that refuses it. Keys of the settings are compared in
        constant time."""
        given = text.encode()
        root, metrics = self._root_key(), self.services.settings.metrics_key
        if root and hmac.compare_digest(given, root.encode()):
            return root_actor(address)
        if metrics and hmac.compare_digest(given, metrics.encode()):
            return Actor(METRICS, "operator", frozenset({"metrics"}), address=address)
        try:
            api_key = await self.services.recent_api_keys.find(text)
            if api_key is None:
                return UNKNOWN_KEY
            if not api_key.is_valid(self.services.clock.now()):
                return _refusal_of(api_key)
            return await self._actor_of(api_key, address)
        except TransientError as error:
            return unavailable_response(str(error))

    async def actor_of_bearer(self, bearer: Bearer, address: str) -> Actor | None:
        """The actor of the API key that opened a session; None when it is not valid any more."""
        if bearer.api_key == ROOT:
            root = self._root_key()
            is_root = root and hmac.compare_digest(bearer.sha256, digest(root))
            return root_actor(address) if is_root else None
        api_key = await self.services.recent_api_keys.find_digest(bearer.api_key, bearer.sha256)
        if api_key is None or not api_key.is_valid(self.services.clock.now()):
            return None
        return await self._actor_of(api_key, address)

    async def actor_with_id(self, identity: str, address: str) -> Actor | None:
        """The actor of the API key with an id; None when it is not valid."""
        if identity == ROOT:
            return root_actor(address)
        api_key = await self.services.recent_api_keys.find_id(identity)
        if api_key is None or not api_key.is_valid(self.services.clock.now()):
            return None
        return await self._actor_of(api_key, address)

    async def _actor_of(self, api_key: ApiKey, address: str) -> Actor:
        """The actor of a valid API key, with the workspaces that it may see. Raises TransientError when
        they cannot be read."""
        workspaces = None
        if api_key.organisation is not None and api_key.workspace is None:
            workspaces = await self.services.recent_workspaces.workspaces_of(api_key.organisation)
        return Actor(
            api_key.id,
            api_key.owner,
            api_key.effective_scopes,
            api_key.workspace,
            address,
            expires_at=api_key.expires_at,
            organisation=api_key.organisation,
            workspaces=workspaces,
            person_id=api_key.person,
            role=api_key.role,
        )

    def _root_key(self) -> str | None:
        now = self.services.clock.elapsed_s()
        if now >= self._root_until:
            self._root = self.services.settings.read_api_key()
            self._root_until = now + ROOT_KEPT_S
        return self._root


class CredentialReader(Protocol):
    """Reads one kind of credential. Requests that it refuses count as a stranger's unless
    `is_trusted`."""

    is_trusted: bool

    def is_carried(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request carries this credential at a path where it is read."""
        ...

    async def read(self, scope: Scope, headers: Headers, address: str) -> Actor | Response:
        """The actor of a request, or the response that refuses it."""
        ...


class SignedUrlReader:
    """Reads signed URLs. Each gives its request one right of the API key that asked for it."""

    is_trusted = True

    def __init__(self, credentials: Credentials, check: SignatureCheck) -> None:
        self._credentials, self._check = credentials, check

    def is_carried(self, scope: Scope, headers: Headers) -> bool:
        return bool(scope["path"].startswith(TRANSFERS))

    async def read(self, scope: Scope, headers: Headers, address: str) -> Actor | Response:
        query = scope.get("query_string", b"").decode("latin-1")
        try:
            grant = await self._check.read(scope["method"], scope["path"], query)
            found = await self._credentials.actor_with_id(grant.api_key, address)
        except Refused as error:
            refusal = refusal_response(error)
            refusal.headers.update(CLOSING)
            return refusal
        except TransientError as error:
            return unavailable_response(str(error))
        except UNAVAILABLE_ERRORS:
            return unavailable_response("the database does not answer now; try again")
        needed = TRANSFERRING.get(scope["method"], "admin")
        if found is None or not found.may(needed):
            return ENDED_URL
        scope.setdefault("state", {})["grant"] = grant
        return replace(found, scopes=frozenset({needed}))


class HeaderReader:
    """Reads an API key in a header of requests below a path."""

    is_trusted = False

    def __init__(self, credentials: Credentials, header: str, *, below: str = "/") -> None:
        self._credentials, self._header, self._below = credentials, header, below

    def is_carried(self, scope: Scope, headers: Headers) -> bool:
        return self._header in headers and scope["path"].startswith(self._below)

    async def read(self, scope: Scope, headers: Headers, address: str) -> Actor | Response:
        value = headers[self._header]
        if len(headers.getlist(self._header)) > 1:
            return SEVERAL
        if len(value) > LONGEST_HEADER:
            return TOO_LONG
        text = _bearer_text(value) if self._header == AUTHORIZATION else value.strip()
        if not text:
            return UNAUTHORIZED
        found = await self._credentials.actor_with(text, address)
        if isinstance(found, Actor):
            scope.setdefault("state", {})[KEY_SHA256] = digest(text)
        return found


class CookieReader:
    """Reads the session of a browser at a page. A page without a session leads to the sign-in page."""

    is_trusted = False

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._name = cookie_name(credentials.services.settings.public_url)

    def is_carried(self, scope: Scope, headers: Headers) -> bool:
        return is_for_browsers(scope["path"])

    async def read(self, scope: Scope, headers: Headers, address: str) -> Actor | Response:
        services = self._credentials.services
        try:
            bearer = await services.sessions.find_bearer(cookie_of(headers, name=self._name))
            found = await self._credentials.actor_of_bearer(bearer, address) if bearer else None
        except TransientError as error:
            return unavailable_response(str(error))
        except UNAVAILABLE_ERRORS:
            return unavailable_response("the database does not answer now; try again")
        if found is None or bearer is None:
            return sign_in_response(scope)
        if not comes_from_here(scope, headers, public_url=services.settings.public_url):
            return FOREIGN_ORIGIN
        scope.setdefault("state", {}).update({"bearer": bearer, KEY_SHA256: bearer.sha256})
        return found


def readers_of(services: Services) -> tuple[Sequence[CredentialReader], CookieReader]:
    """The readers of the credentials that a request carries on purpose, in their order, and that of the
    cookie, which a browser sends by itself."""
    credentials = Credentials(services)
    readers = (
        SignedUrlReader(credentials, services.signed_urls),
        HeaderReader(credentials, AUTHORIZATION),
        HeaderReader(credentials, API_KEY_HEADER, below=API),
    )
    return readers, CookieReader(credentials)


def root_actor(address: str) -> Actor:
    """The actor of the root API key."""
    return Actor(ROOT, ROOT_OWNER, frozenset({"admin"}), address=address)


def _refusal_of(api_key: ApiKey) -> Response:
    """The refusal of an API key that is known but not valid. It says why, and what to do."""
    until = f"{api_key.expires_at:%Y-%m-%d %H:%M} UTC" if api_key.expires_at is not None else ""
    if api_key.has_lost_its_person:  # the keys of a member who is removed are revoked, too
        reason = (
            "belongs to a person who is not a member of its organisation any more; ask an owner for "
            "an invitation"
        )
    elif api_key.revoked_at is not None:
        reason = "was revoked; get another one with `headrace login` or `headrace key create`"
    elif api_key.has_old_secret:
        reason = f"was rotated, and this secret of it was valid until {until}; use the new secret"
    else:
        reason = (
            f"expired at {until}; an administrator makes a new secret for it with "
            f"`headrace key rotate {api_key.name}`"
        )
    detail = f"the API key {api_key.prefix} {reason}"
    is_revoked = api_key.revoked_at is not None or api_key.has_lost_its_person
    kind = "revoked" if is_revoked else "expired"
    return problem(401, "UNAUTHORIZED", detail, headers=CHALLENGE, reason=kind)


def _bearer_text(value: str) -> str:
    """The API key in the value of an Authorization header; empty for another scheme."""
    scheme, _, text = value.partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""
