"""Sign-ins with the provider that have begun: each has a state, and belongs to one browser.

The browser keeps a random secret in a cookie, and the provider sends the state back. The database has
only the SHA-256 of both. The nonce and the verifier of PKCE follow from them, so nobody who reads the
database can end a sign-in. A state is used once.
"""

import base64
import hashlib
import secrets
from dataclasses import dataclass, field

from infra.identity.api_key_format import digest
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/identity/oidc/oidc.sql")

LASTS_S = 600.0
"""How long a person may take to sign in with the provider."""

MOST_OPEN = 20_000
"""How many sign-ins may have begun at the same time. A further one takes the place of the oldest."""

LONGEST = 200


@dataclass(frozen=True, slots=True)
class SignInAttempt:
    """A sign-in that has begun: the state, and the secret that the browser keeps."""

    state: str
    secret: str = field(repr=False)

    @property
    def nonce(self) -> str:
        """The text that the ID token of this sign-in must hold."""
        return self._derive("nonce")

    @property
    def verifier(self) -> str:
        """The code verifier of PKCE (RFC 7636)."""
        return self._derive("verifier")

    def _derive(self, purpose: str) -> str:
        made = hashlib.sha256(f"{purpose}\n{self.state}\n{self.secret}".encode()).digest()
        return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


class Attempts:
    """Stores sign-ins that have begun."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def begin(self, following: str) -> SignInAttempt:
        """Begin a sign-in that leads to a path of this server."""
        attempt = SignInAttempt(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        await self._pool.execute(
            SQL["insert_attempt"],
            digest(attempt.state),
            digest(attempt.secret),
            following,
            LASTS_S,
            MOST_OPEN,
        )
        return attempt

    async def take(self, state: str, secret: str) -> tuple[SignInAttempt, str] | None:
        """Use a sign-in up, for the browser in which it began. Returns it with the path to which it
        leads; None when it is unknown, used, too old, or another browser's."""
        if not 0 < len(state) <= LONGEST or not 0 < len(secret) <= LONGEST:
            return None
        row = await self._pool.fetchrow(SQL["take_attempt"], digest(state), digest(secret))
        return None if row is None else (SignInAttempt(state, secret), str(row["next"]))
