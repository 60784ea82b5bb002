"""Requests to the sign-in provider. They are bounded in time and in the bytes of the answer, so that a
provider that is slow, dead or hostile costs one request of one browser and nothing else.

It is reached at public and private addresses, on this machine only if its issuer is, and never at the
addresses where clouds give out credentials.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.rate_limited_log import RateLimit
from infra.settings.git import AllowedAddresses
from infra.settings.oidc import OidcSettings
from schemas.errors import InvalidConfig, TransientError
from schemas.text import plain

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

WITHIN_S = 10.0
MOST_BYTES = 512 << 10
MOST_CONNECTIONS = 20
ADVICE = "the sign-in provider may not be there"


class SignInAway(TransientError):
    """The sign-in provider does not answer, or not in a form that can be used."""


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The status and the JSON value of an answer. `body` is None for what is not JSON."""

    status: int
    body: Any


class ProviderRequests:
    """Asks the provider over HTTP."""

    def __init__(
        self, settings: OidcSettings, *, resolve: Resolve = resolve, within_s: float = WITHIN_S
    ) -> None:
        allowed = AllowedAddresses(
            loopback=settings.is_local, private=True, hosts=frozenset((settings.host,))
        )
        self._dialling = CheckedDialling(allowed, resolve=resolve, advice=ADVICE)
        self._host, self._within_s = settings.host, within_s

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        tls = httpx.create_ssl_context()
        limits = httpx.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=4)
        return httpx.AsyncClient(
            timeout=self._within_s,
            transport=CheckedTransport(self._dialling, tls=tls, limits=limits),
            cookies=no_cookies(),
        )

    async def aclose(self) -> None:
        """Close the connections, if any was opened."""
        opened: httpx.AsyncClient | None = vars(self).pop("_client", None)
        if opened is not None:
            await opened.aclose()

    async def ask(
        self,
        method: str,
        url: str,
        *,
        form: str | None = None,
        auth: httpx.Auth | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> JsonAnswer:
        """The answer to a request. Redirects are not followed. Raises SignInAway."""
        sent = {"Accept": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        if form is not None:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            async with (
                asyncio.timeout(self._within_s),
                self._client.stream(
                    method, url, content=form, headers=sent, auth=auth, follow_redirects=False
                ) as answer,
            ):
                data = bytearray()
                async for chunk in answer.aiter_raw():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise self.away(f"an answer has more than {MOST_BYTES} bytes")
                return JsonAnswer(answer.status_code, _json(bytes(data)))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise self.away(f"{type(error).__name__}: {error}") from error
        except InvalidConfig as error:
            raise self.away(error.message) from error
        except SignInAway:
            raise
        except TransientError as error:
            raise self.away(str(error)) from error

    def away(self, reason: str) -> SignInAway:
        """The error for a provider that cannot be used now. The log has the reason, which is not for
        everybody."""
        logger.warning("the sign-in provider %s: %s", self._host, plain(reason)[:300])
        return SignInAway(
            f"the sign-in provider {self._host} does not answer as it should; try again in a minute, or "
            "sign in with an API key"
        )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
