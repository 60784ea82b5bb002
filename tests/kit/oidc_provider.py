"""An OpenID Connect provider in this process that can lie. `tests/browser/test_oidc_walk.py` takes the
same way with a certified provider."""

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, OctKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer

CLIENT, SECRET = "headrace", "a-secret-of-the-client"


@dataclass
class Person:
    """An account of the provider."""

    subject: str
    claims: Mapping[str, Any] = field(default_factory=dict)


def account(name: str, *groups: str, verified: object = True) -> Person:
    """An account with an address, and groups."""
    claims: dict[str, Any] = {"email": f"{name}@example.org", "name": name, "groups": list(groups)}
    if verified is not None:
        claims["email_verified"] = verified
    return Person(f"subject-of-{name}", claims)


@dataclass
class LyingProvider:
    """The provider. Tests change what it says."""

    issuer: str = ""
    key: ECKey = field(default_factory=lambda: ECKey.generate_key("P-256", auto_kid=True))
    published: list[Any] = field(default_factory=list)
    lies: dict[str, Any] = field(default_factory=dict)
    """Claims of ID tokens that replace the true ones."""
    document: dict[str, Any] = field(default_factory=dict)
    """Members of the discovery document that replace the true ones."""
    userinfo: dict[str, Any] | None = None
    forgives: bool = False
    """Whether it takes a code twice."""
    holds: asyncio.Event | None = None
    """With it the token endpoint waits until it is set."""
    asked: list[str] = field(default_factory=list)
    _codes: dict[str, tuple[Person, dict[str, str]]] = field(default_factory=dict)

    def back(self, location: str, person: Person) -> dict[str, str]:
        """What a browser brings back after the person has signed in at the address to which this
        location sends it."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(8)
        self._codes[code] = (person, query)
        return {"code": code, "state": query["state"], "iss": self.issuer}

    def id_token(self, person: Person, nonce: str) -> str:
        """A signed ID token, with the lies."""
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": person.subject,
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
            **({} if self.userinfo is not None else person.claims),
            **self.lies,
        }
        header = {"alg": "ES256", "kid": self.key.kid}
        return jwt.encode(header, claims, self.key, algorithms=["ES256"])

    async def _discover(self, _: Request) -> Response:
        self.asked.append("discovery")
        found = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/jwks",
            "authorization_response_iss_parameter_supported": True,
        }
        if self.userinfo is not None:
            found["userinfo_endpoint"] = f"{self.issuer}/userinfo"
        return JSONResponse({**found, **self.document})

    async def _keys(self, _: Request) -> Response:
        self.asked.append("jwks")
        keys = self.published or [self.key.as_dict(private=False)]
        return JSONResponse({"keys": keys})

    async def _token(self, request: Request) -> Response:
        self.asked.append("token")
        if self.holds is not None:
            await self.holds.wait()
        form = {
            name: values[0] for name, values in parse_qs((await request.body()).decode()).items()
        }
        expected = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if request.headers.get("authorization") != f"Basic {expected}":
            return JSONResponse({"error": "invalid_client"}, 401)
        take = self._codes.get if self.forgives else self._codes.pop
        found = take(form["code"], None)
        if found is None:
            return JSONResponse({"error": "invalid_grant"}, 400)
        person, query = found
        made = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(made).rstrip(b"=").decode()
        if challenge != query["code_challenge"] or form["redirect_uri"] != query["redirect_uri"]:
            return JSONResponse({"error": "invalid_grant"}, 400)
        return JSONResponse(
            {
                "access_token": "an-access-token",
                "token_type": "Bearer",
                "id_token": self.id_token(person, query["nonce"]),
            }
        )

    async def _userinfo(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer an-access-token"
        return JSONResponse(self.userinfo)

    def routes(self) -> list[Route]:
        return [
            Route("/.well-known/openid-configuration", self._discover),
            Route("/jwks", self._keys),
            Route("/token", self._token, methods=["POST"]),
            Route("/userinfo", self._userinfo),
        ]


@asynccontextmanager
async def lying_provider() -> AsyncIterator[LyingProvider]:
    """The provider, served on a free port of this machine until the block ends."""
    provider = LyingProvider()
    server = HttpServer(
        Starlette(routes=provider.routes()), host="127.0.0.1", port=0, limits=ConnectionLimits()
    )
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    provider.issuer = f"http://127.0.0.1:{server.port}"
    try:
        yield provider
    finally:
        server.stop()
        await serving


def shared_secret(text: str) -> OctKey:
    """A symmetric key."""
    return OctKey.import_key(text)


def environment(issuer: str, groups: str, **more: str) -> dict[str, str]:
    """The settings of an installation whose people sign in with this provider."""
    return {
        "HEADRACE_OIDC_ISSUER": issuer,
        "HEADRACE_OIDC_CLIENT_ID": CLIENT,
        "HEADRACE_OIDC_CLIENT_SECRET": SECRET,
        "HEADRACE_OIDC_GROUPS": groups,
        **more,
    }
