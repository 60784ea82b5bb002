"""Lists the refs of a repository over HTTPS without starting git.

A poll asks many repositories that did not change. Git starts two processes and a TLS connection for each
question, which costs 40 ms of CPU time. One request of protocol version 2 over a connection that stays
open costs about one. Nothing is concluded from a failure: for each answer that is not a plain listing
(another status, a redirect, an older protocol, too much) git is asked instead.

The answer is hostile input. It is read up to a limit and before a deadline, uncompressed, and parsed as
text that is split at given lengths. The token goes to this one address, and no redirect is followed.
"""

import asyncio
import base64
import ssl
import time
from collections.abc import Iterator
from types import TracebackType
from urllib.parse import urlsplit

import httpx

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.ports.services import RefList
from infra.repositories.git.credentials import GitCredential, TokenCredential
from infra.repositories.git.refs import BRANCH, TAG, make_listing
from infra.settings.git import AllowedAddresses

DEADLINE_S = 20.0
"""How long one question may take before git is asked instead."""

MOST_BYTES = 8 << 20
"""The longest answer that is read. The refs that are followed fit into it."""

MOST_AT_ONCE = 64 << 10
"""A longer answer is parsed in a thread."""

IDLE_S = 100.0
"""How long a connection stays open without a question. It is longer than the time between two polls."""

LEFT_S = 3600.0
MOST_LEFT = 1000
"""For how long an address that does not answer in this way is left to git, and how many are known."""

FLUSH, DELIMITER = b"0000", b"0001"


def _packet(text: str) -> bytes:
    return f"{len(text) + 4:04x}{text}".encode()


REQUEST = b"".join(
    (
        *map(_packet, ("command=ls-refs\n", "object-format=sha1")),
        DELIMITER,
        *map(_packet, ("peel\n", "symrefs\n", "ref-prefix HEAD\n")),
        *(_packet(f"ref-prefix {prefix}\n") for prefix in (BRANCH, TAG)),
        FLUSH,
    )
)
TYPE = "application/x-git-upload-pack-{}"
HEADERS = {
    "Git-Protocol": "version=2",
    "Content-Type": TYPE.format("request"),
    "Accept": TYPE.format("result"),
    "Accept-Encoding": "identity",
    "User-Agent": "git/headrace",
}


class SmartHttp:
    """Asks repositories over connections that stay open, at `allowed` addresses. A repository that did
    not answer although git could list it is left to git for an hour."""

    def __init__(
        self,
        allowed: AllowedAddresses = AllowedAddresses(),  # noqa: B008 - it is frozen
        *,
        resolve: Resolve = resolve,
        schemes: tuple[str, ...] = ("https",),
    ) -> None:
        self._schemes = schemes
        self._left: dict[str, float] = {}
        limits = httpx.Limits(max_keepalive_connections=64, keepalive_expiry=IDLE_S)
        tls = ssl.create_default_context()
        self._client = httpx.AsyncClient(
            transport=CheckedTransport(
                CheckedDialling(allowed, resolve=resolve), tls=tls, limits=limits
            ),
            trust_env=False,
            cookies=no_cookies(),
            follow_redirects=False,
            timeout=DEADLINE_S,
        )

    async def __aenter__(self) -> "SmartHttp":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def list_refs(self, url: str, credential: GitCredential | None) -> RefList | None:
        """Return the branches and tags, or None when git has to be asked."""
        if urlsplit(url).scheme not in self._schemes or self._left.get(url, 0) > time.monotonic():
            return None
        headers = dict(HEADERS)
        if isinstance(credential, TokenCredential):
            login = f"{credential.username}:{credential.token}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._post(f"{url.rstrip('/')}/git-upload-pack", headers)
            if answer is None:
                return None
            if len(answer) > MOST_AT_ONCE:
                return await asyncio.to_thread(read_answer, answer, url=url)
            return read_answer(answer, url=url)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError, ValueError):
            return None

    def leave_to_git(self, url: str) -> None:
        """Remember that git could list this address, and this class could not."""
        if urlsplit(url).scheme in self._schemes:
            if len(self._left) >= MOST_LEFT:
                self._left.clear()
            self._left[url] = time.monotonic() + LEFT_S

    async def _post(self, url: str, headers: dict[str, str]) -> bytes | None:
        """The answer to the request, if it is one of the protocol and not too long."""
        async with self._client.stream("POST", url, content=REQUEST, headers=headers) as response:
            is_plain = (
                response.status_code == httpx.codes.OK
                and response.headers.get("Content-Type") == TYPE.format("result")
                and "Content-Encoding" not in response.headers
            )
            if not is_plain:
                return None
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MOST_BYTES:
                    return None
            return bytes(answer)


def read_answer(answer: bytes, *, url: str) -> RefList:
    """Parse an answer to `ls-refs`. Raises ValueError when it is not one, and Refused when it lists too
    many refs."""
    refs: dict[str, str] = {}
    head = None
    for line in _lines(answer):
        name, *attributes = line.split(" ")[1:]
        values = dict(part.partition(":")[::2] for part in attributes)
        if name == "HEAD":
            head = values.get("symref-target")
        else:
            refs[name] = values.get("peeled", line.partition(" ")[0])
    return make_listing(refs, head, url=url)


def _lines(answer: bytes) -> Iterator[str]:
    """The lines of an answer up to its end. Raises ValueError when one is cut, or the end is missing."""
    at = 0
    while (head := answer[at : at + 4]) != FLUSH:
        size = int(head, 16) if head.isalnum() and len(head) == 4 else 0
        if size <= 4 or at + size > len(answer):
            raise ValueError("this is not an answer of git's protocol")
        line = answer[at + 4 : at + size].decode(errors="replace").rstrip("\n")
        if line.startswith("ERR ") or " " not in line:
            raise ValueError("the repository answered with an error")
        yield line
        at += size
