"""Signed URLs: each allows one request, with a method and a path, until a time, on behalf of an API key.

The signature is an HMAC-SHA256 over the method, the path and the query, so a URL with one other byte is
refused. The key of the signatures is random, and is stored sealed with the secret key of this
installation. A URL ends with the API key that asked for it, because the guard looks that key up, and
with the secret that the key had, because the signature covers that secret's SHA-256.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from urllib.parse import quote, urlencode

from infra.identity.secrets.sealed import Sealer
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import InvalidConfig, Refused

SQL = queries("infra/identity/access.sql")

OWNER, FIELD = "installation", "signed URLs"
READ_AGAIN_S = 10.0
"""How often the key of the signatures is read again when a signature does not match."""

QUERY = re.compile(
    r"(?P<signed>key=(?P<key>[A-Za-z0-9_-]{1,64})&until=(?P<until>[0-9]{1,12})"
    r"(&length=(?P<length>[0-9]{1,15}))?)&signature=(?P<signature>[0-9a-f]{64})"
)
"""The only form of the query of a signed URL."""

SecretsOf = Callable[[str], Awaitable[Sequence[bytes]]]
"""The SHA-256 of the secrets of an API key (an id) that URLs may be bound to now: the present one first,
and the one before it while a rotation overlaps. Empty for an unknown key."""


class BadSignedUrl(Refused):
    """A signed URL does not allow this request."""

    code = "SIGNED_URL"
    status = 403


@dataclass(frozen=True, slots=True)
class Grant:
    """The request that a signed URL allows. `path` is the path at this server, `until` a time in seconds
    since 1970, `api_key` the id of the API key that asked for it, and `length` the number of bytes that
    an upload must have (None: the request has no body)."""

    method: str
    path: str
    until: int
    api_key: str
    length: int | None = None

    @property
    def query(self) -> str:
        """The query of the URL, without the signature."""
        length = {} if self.length is None else {"length": self.length}
        return urlencode({"key": self.api_key, "until": self.until, **length})

    @property
    def signed_bytes(self) -> bytes:
        return f"{self.method}\n{self.path}\n{self.query}".encode()


def sign(grant: Grant, key: bytes, secret: bytes) -> str:
    """The path and query of the signed URL for a grant. It ends with a secret of its API key."""
    return f"{quote(grant.path)}?{grant.query}&signature={_signature(grant, key, secret)}"


def read_grant(
    match: re.Match[str],
    method: str,
    path: str,
    *,
    key: bytes,
    secrets_now: Sequence[bytes],
    now: datetime,
) -> Grant:
    """The grant of a signed URL, whose query is matched, if it allows a request now and is bound to one
    of the secrets. HEAD is allowed where GET is. Raises BadSignedUrl."""
    length = match["length"]
    grant = Grant(
        "GET" if method == "HEAD" else method,
        path,
        int(match["until"]),
        match["key"],
        None if length is None else int(length),
    )
    is_same = grant.query == match["signed"] and any(
        hmac.compare_digest(_signature(grant, key, secret), match["signature"])
        for secret in secrets_now
    )
    if not is_same:
        raise BadSignedUrl(
            f"this signed URL does not allow {method} {path[:200]}: it was changed, was made for "
            "another request, or its API key has a new secret; ask for a new one"
        )
    if now.timestamp() >= grant.until:
        raise BadSignedUrl("this signed URL has expired; ask for a new one")
    return grant


def _signature(grant: Grant, key: bytes, secret: bytes) -> str:
    return hmac.new(key, grant.signed_bytes + b"\n" + secret, hashlib.sha256).hexdigest()


class SignedUrls:
    """Makes and reads signed URLs with the key of this installation."""

    def __init__(
        self, database: Database, sealer: Sealer, clock: Clock, secrets_of: SecretsOf
    ) -> None:
        self._database = database
        self._sealer = sealer
        self._clock = clock
        self._secrets_of = secrets_of
        self._key: bytes | None = None
        self._read_at = float("-inf")

    async def sign(
        self,
        method: str,
        path: str,
        *,
        api_key: str,
        for_s: float,
        length: int | None = None,
        ends_at: datetime | None = None,
    ) -> str:
        """The path and query of a URL that allows this request for so many seconds, and not after
        `ends_at`, when the secret that asks for it expires. Raises InvalidConfig without a usable secret
        key, BadSignedUrl when the API key is unknown, and TransientError when it cannot be read."""
        secrets_now = await self._secrets_of(api_key)
        if not secrets_now:
            raise BadSignedUrl("the API key is not known any more; ask with a valid API key")
        until = self._clock.now().timestamp() + for_s
        if ends_at is not None:
            until = min(until, ends_at.timestamp())
        grant = Grant(method, path, int(until), api_key, length)
        return sign(grant, await self._load_key(), secrets_now[0])

    async def read(self, method: str, path: str, query: str) -> Grant:
        """The grant of a URL that allows this request now. Raises BadSignedUrl, and TransientError when
        the API keys cannot be read."""
        match = QUERY.fullmatch(query)
        if match is None:
            raise BadSignedUrl(
                "the query of this signed URL is not complete; use the URL unchanged"
            )
        secrets_now = await self._secrets_of(match["key"])
        key, now = await self._load_key(), self._clock.now()
        read = partial(read_grant, match, method, path, secrets_now=secrets_now, now=now)
        try:
            return read(key=key)
        except BadSignedUrl:
            newer = await self._load_key(again=True)
            if newer == key:
                raise
            return read(key=newer)

    async def _load_key(self, *, again: bool = False) -> bytes:
        """The key. It is read `again` for another process may have replaced it, which happens where the
        secret key of the installation was lost."""
        is_due = again and self._clock.elapsed_s() - self._read_at >= READ_AGAIN_S
        if self._key is None or is_due:
            self._read_at = self._clock.elapsed_s()
            self._key = await self._open_key()
        return self._key

    async def _open_key(self) -> bytes:
        stored: bytes | None = await self._database.lazy.fetchval(SQL["url_key"])
        if stored is not None:
            try:
                return bytes.fromhex(await self._sealer.open(stored, owner=OWNER, field=FIELD))
            except InvalidConfig:
                pass  # the secret key was lost: URLs of before end, and no other data depends on it
        made = secrets.token_bytes(32)
        sealed = await self._sealer.seal(made.hex(), owner=OWNER, field=FIELD)
        await self._database.durable.execute(SQL["put_url_key"], sealed, stored)
        kept: bytes = await self._database.durable.fetchval(SQL["url_key"])
        return bytes.fromhex(await self._sealer.open(kept, owner=OWNER, field=FIELD))
