"""Follows the redirect of a repository that has moved, or whose address lacks its `.git`.

Git follows none itself, because it would dial the new address without a check. So the new address is
read here, and git is asked again there after the same check as for every other address.
"""

import base64
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TypeVar
from urllib.parse import urljoin

import httpx

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.repositories.git.credentials import GitCredential, TokenCredential
from infra.repositories.git.process import GitFailed
from infra.repositories.git.urls import RepositoryUrl
from infra.settings.git import AllowedAddresses
from schemas.errors import InvalidConfig, Refused

T = TypeVar("T")

SUFFIX = "/info/refs?service=git-upload-pack"
MOVED = "returned error: 30"
MOST_REDIRECTS = 3
ASK_S = 20.0
KNOWN_S = 600.0
MOST_KNOWN = 1000


class Redirects:
    """Where repositories have moved. A place is remembered for KNOWN_S."""

    def __init__(self, allowed: AllowedAddresses, *, resolve: Resolve = resolve) -> None:
        self._dialling = CheckedDialling(allowed, resolve=resolve)
        self._known: dict[str, tuple[float, RepositoryUrl]] = {}

    async def follow(
        self,
        url: RepositoryUrl,
        credential: GitCredential | None,
        attempt: Callable[[RepositoryUrl], Awaitable[T]],
    ) -> T:
        """Return the result of `attempt` at the place of a repository. Raises what `attempt` raises, and
        InvalidConfig when the new place may not be reached."""
        until, at = self._known.get(url.text, (0.0, url))
        try:
            return await attempt(at if until > time.monotonic() else url)
        except GitFailed as error:
            if url.protocol not in ("https", "http") or MOVED not in error.stderr:
                raise
            moved = await self._find(url, credential)
            if moved is None:
                raise
        result = await attempt(moved)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[url.text] = (time.monotonic() + KNOWN_S, moved)
        return result

    async def _find(
        self, url: RepositoryUrl, credential: GitCredential | None
    ) -> RepositoryUrl | None:
        """The place to which the server of a repository leads, or None."""
        at, place = url, None
        limits = httpx.Limits(max_connections=1)
        transport = CheckedTransport(self._dialling, tls=self._tls, limits=limits)
        async with httpx.AsyncClient(
            transport=transport, timeout=ASK_S, trust_env=False, cookies=no_cookies()
        ) as client:
            for _ in range(MOST_REDIRECTS):
                headers = _login(credential) if _origin(at) == _origin(url) else {}
                try:
                    location = await _ask(client, at.text.rstrip("/") + SUFFIX, headers)
                except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
                    break
                if location is None:
                    break
                at = place = _place(at, location)
        return place

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


async def _ask(client: httpx.AsyncClient, url: str, headers: dict[str, str]) -> str | None:
    """The place that an answer leads to, or None. Its body is not read."""
    async with client.stream("GET", url, headers=headers, follow_redirects=False) as answer:
        is_moved = answer.status_code in (301, 302, 303, 307, 308)
        return answer.headers.get("location") if is_moved else None


def _place(at: RepositoryUrl, location: str) -> RepositoryUrl:
    """The repository of a redirect. Raises Refused when it is not one by the same protocol."""
    target = urljoin(at.text.rstrip("/") + SUFFIX, location)
    try:
        if not target.startswith(f"{at.protocol}://") or not target.endswith(SUFFIX):
            raise InvalidConfig(f"it is not that of a repository over {at.protocol}")
        return RepositoryUrl.parse(target.removesuffix(SUFFIX))
    except InvalidConfig as error:
        raise Refused(
            f"{at.text} sends git to another address that is not used ({error}); connect the repository "
            "by its present address"
        ) from error


def _login(credential: GitCredential | None) -> dict[str, str]:
    if not isinstance(credential, TokenCredential):
        return {}
    login = f"{credential.username}:{credential.token}".encode()
    return {"Authorization": f"Basic {base64.b64encode(login).decode()}"}


def _origin(url: RepositoryUrl) -> tuple[str, str, int]:
    return url.protocol, url.host, url.port
