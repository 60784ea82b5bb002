"""The sign-in provider: its addresses and keys, the way of a browser to it, and who came back.

Authlib makes the requests of the protocol and checks the answers. The addresses are read from the
provider's discovery document and kept for an hour, and so are its keys. An ID token with an unknown key
lets the keys be read again, but not more often than KEYS_AGAIN_S.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.discovery import get_well_known_url
from joserfc.jwk import KeySet

from infra.identity.oidc.answers import ProviderRequests, SignInAway
from infra.identity.oidc.attempts import SignInAttempt
from infra.identity.oidc.id_token import (
    Expected,
    SignInRefused,
    UnknownSigningKey,
    check_id_token,
    groups_of,
    read_keys,
)
from infra.settings.git import THIS_MACHINE
from infra.settings.oidc import OidcSettings
from infra.spine.ports.clock import Clock
from schemas.text import plain

KEPT_S = 3600.0
AGAIN_S = 5.0
"""How soon a provider that did not answer is asked for its addresses again."""

KEYS_AGAIN_S = 10.0
LONGEST_URL = 2000
BASIC, POST = "client_secret_basic", "client_secret_post"


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who signed in with the provider. `has_verified_email` is None when the provider says
    nothing about it."""

    issuer: str
    subject: str
    email: str | None
    has_verified_email: bool | None
    name: str | None
    groups: frozenset[str]


@dataclass(frozen=True, slots=True)
class Discovery:
    """The part of the provider's discovery document that is used."""

    authorization: str
    token: str
    keys: str
    userinfo: str | None
    auth_methods: tuple[str, ...]
    names_issuer: bool


class OidcProvider:
    """Speaks to the provider. `redirect_uri` is the address of this server to which it sends browsers
    back."""

    def __init__(
        self,
        settings: OidcSettings,
        redirect_uri: str,
        clock: Clock,
        requests: ProviderRequests | None = None,
    ) -> None:
        self._settings, self._redirect_uri, self._clock = settings, redirect_uri, clock
        self._requests = requests or ProviderRequests(settings)
        self._known: tuple[Discovery, KeySet] | None = None
        self._read_at = self._keys_at = self._failed_at = float("-inf")
        self._reading: asyncio.Task[SignInAway | None] | None = None

    async def aclose(self) -> None:
        """Close the connections to the provider."""
        await self._requests.aclose()

    async def authorization_url(self, attempt: SignInAttempt) -> str:
        """The address to which a browser is sent. Raises SignInAway."""
        discovery, _ = await self._load()
        return str(
            prepare_grant_uri(
                discovery.authorization,
                self._settings.client_id,
                "code",
                redirect_uri=self._redirect_uri,
                scope=list(self._settings.scopes),
                state=attempt.state,
                nonce=attempt.nonce,
                code_challenge=create_s256_code_challenge(attempt.verifier),
                code_challenge_method="S256",
            )
        )

    async def check_issuer(self, issuer: str | None) -> None:
        """Check the issuer that a browser brings back (RFC 9207), so that no other provider's answer is
        taken for one of this. Raises SignInRefused, SignInAway."""
        discovery, _ = await self._load()
        is_missing = issuer is None and discovery.names_issuer
        if is_missing or issuer not in (None, self._settings.issuer):
            raise SignInRefused("the answer comes from another sign-in provider; sign in again")

    async def redeem(self, code: str, attempt: SignInAttempt) -> Identity:
        """The person whose code a browser brought back. Raises SignInRefused, SignInAway."""
        discovery, keys = await self._load()
        tokens = await self._redeem_code(discovery, code, attempt)
        access_token = tokens.get("access_token")
        expected = Expected(
            self._settings.issuer,
            self._settings.client_id,
            attempt.nonce,
            access_token if isinstance(access_token, str) else None,
        )
        text = tokens.get("id_token")
        if not isinstance(text, str):
            raise SignInRefused("the provider sent no ID token; ask the operator")
        try:
            claims = check_id_token(text, keys, expected, now_s=self._now_s())
        except UnknownSigningKey:
            newer = await self._read_keys_again()
            claims = check_id_token(text, newer, expected, now_s=self._now_s())
        if discovery.userinfo and expected.access_token:
            claims = await self._complete(discovery.userinfo, claims, expected.access_token)
        return identity_of(claims, self._settings)

    async def _redeem_code(
        self, discovery: Discovery, code: str, attempt: SignInAttempt
    ) -> Mapping[str, Any]:
        client, secret = self._settings.client_id, self._settings.client_secret
        sent = {"code": code, "code_verifier": attempt.verifier}
        auth = None
        if BASIC in discovery.auth_methods:  # the two are encoded first (RFC 6749, section 2.3.1)
            auth = httpx.BasicAuth(quote(client, safe=""), quote(secret, safe=""))
        else:
            sent |= {"client_id": client, "client_secret": secret}
        form = prepare_token_request("authorization_code", redirect_uri=self._redirect_uri, **sent)
        answer = await self._requests.ask("POST", discovery.token, form=form, auth=auth)
        if answer.status == 200 and isinstance(answer.body, dict):
            return answer.body
        error = answer.body.get("error") if isinstance(answer.body, dict) else None
        if answer.status >= 500 or not isinstance(error, str):
            raise self._requests.away(f"status {answer.status} for a code")
        if error != "invalid_grant":
            raise self._requests.away(f"it refuses this installation: {error}")
        raise SignInRefused(
            "the provider does not take its code any more (invalid_grant); sign in again"
        )

    async def _complete(
        self, url: str, claims: Mapping[str, Any], access_token: str
    ) -> Mapping[str, Any]:
        """The claims, with those that the provider has only at its userinfo endpoint."""
        wanted = ("email", "email_verified", "name", self._settings.groups_claim)
        if all(name in claims for name in wanted):
            return claims
        answer = await self._requests.ask(
            "GET", url, headers={"Authorization": f"Bearer {access_token}"}
        )
        if answer.status != 200 or not isinstance(answer.body, dict):
            raise self._requests.away(f"status {answer.status} at its userinfo endpoint")
        if answer.body.get("sub") != claims["sub"]:
            raise SignInRefused("the provider names two different people; ask the operator")
        return {**answer.body, **claims}

    async def _load(self) -> tuple[Discovery, KeySet]:
        """The known facts of the provider, read once for all requests that wait for it."""
        now = self._clock.elapsed_s()
        if self._known is not None and now - self._read_at < KEPT_S:
            return self._known
        if now - self._failed_at < AGAIN_S:
            if self._known is not None:
                return self._known
            raise self._requests.away("it did not answer a moment ago")
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        failed = await asyncio.shield(self._reading)
        if self._known is None:
            raise failed or self._requests.away("it was not read")
        return self._known

    async def _read(self) -> SignInAway | None:
        """Read addresses and keys. Those that are known stay when the provider does not answer."""
        try:
            url = get_well_known_url(self._settings.issuer, external=True)
            answer = await self._requests.ask("GET", url)
            discovery = read_discovery(answer.body, self._settings, self._requests.away)
            self._known = (discovery, await self._read_keys(discovery))
            self._read_at = self._keys_at = self._clock.elapsed_s()
        except SignInAway as error:
            self._failed_at = self._clock.elapsed_s()
            return error
        finally:
            self._reading = None
        return None

    async def _read_keys(self, discovery: Discovery) -> KeySet:
        answer = await self._requests.ask("GET", discovery.keys)
        try:
            return read_keys(answer.body)
        except ValueError as error:
            raise self._requests.away(str(error)) from error

    async def _read_keys_again(self) -> KeySet:
        discovery, keys = await self._load()
        if self._clock.elapsed_s() - self._keys_at < KEYS_AGAIN_S:
            return keys
        self._keys_at = self._clock.elapsed_s()
        keys = await self._read_keys(discovery)
        self._known = (discovery, keys)
        return keys

    def _now_s(self) -> int:
        return int(self._clock.now().timestamp())


def read_discovery(
    document: Any, settings: OidcSettings, away: Callable[[str], SignInAway]
) -> Discovery:
    """The discovery document of the issuer in the settings, whose addresses must be safe. Raises what
    `away` makes."""
    found = document if isinstance(document, dict) else {}
    if found.get("issuer") != settings.issuer:
        raise away(f"its discovery document is not of the issuer {settings.issuer}")
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        if not _is_safe(found.get(name), settings):
            raise away(f"its {name} is not an https:// address")
    userinfo = found.get("userinfo_endpoint")
    methods = found.get("token_endpoint_auth_methods_supported")
    named = tuple(methods) if isinstance(methods, list) else (BASIC,)
    if not {BASIC, POST} & {one for one in named if isinstance(one, str)}:
        raise away("it takes no client secret at its token endpoint")
    return Discovery(
        authorization=found["authorization_endpoint"],
        token=found["token_endpoint"],
        keys=found["jwks_uri"],
        userinfo=userinfo if _is_safe(userinfo, settings) else None,
        auth_methods=named,
        names_issuer=found.get("authorization_response_iss_parameter_supported") is True,
    )


def identity_of(claims: Mapping[str, Any], settings: OidcSettings) -> Identity:
    """The person that claims name. Raises SignInRefused for an address that the provider says is not
    verified, and for groups that cannot be read."""
    email = claims.get("email")
    verified = claims.get("email_verified")
    if verified is not None and verified not in (True, "true"):
        raise SignInRefused(
            f"the provider {settings.host} has not verified your e-mail address; verify it there, and "
            "sign in again"
        )
    names = (claims.get("name"), claims.get("preferred_username"))
    name = next((one for one in names if isinstance(one, str) and one.strip()), None)
    return Identity(
        issuer=settings.issuer,
        subject=str(claims["sub"]),
        email=email if isinstance(email, str) else None,
        has_verified_email=None if verified is None else True,
        name=None if name is None else plain(name),
        groups=groups_of(claims, settings.groups_claim),
    )


def _is_safe(url: object, settings: OidcSettings) -> bool:
    """Whether an address of the provider may be used: https, or plain http on this machine for a
    provider that is there."""
    if not isinstance(url, str) or len(url) > LONGEST_URL or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        is_local = parts.scheme == "http" and parts.hostname in THIS_MACHINE and settings.is_local
        return bool(parts.hostname) and (parts.scheme == "https" or is_local)
    except ValueError:
        return False
