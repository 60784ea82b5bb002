"""Requests to the API of a forge: bounded answers, a deadline, and no token for another host.

What a forge refuses becomes Refused with what to do. A forge that is away, or asks to wait, becomes
ForgeAway with the pause that it asked for.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from schemas.errors import ForgeAway, Refused
from schemas.text import plain

MOST_BYTES = 8 << 20
"""The largest answer that is read. A page of a hundred hooks or statuses has some 100 KiB."""

DEADLINE_S = 30.0
"""How long a request may take, with its answer."""

MOST_REDIRECTS = 3
PAUSE_S = 15.0
LONGEST_PAUSE_S = 3600.0
"""The longest pause that a forge may ask for. GitHub's limits are counted by the hour."""

SHOWN = 200
"""How many characters of a forge's own message an error shows."""

SECRET_WORD = re.compile(r"[A-Za-z0-9_.=-]{20,}")
"""A word of a forge's message that could be a token."""


BAD_REQUEST = (
    "no request can be made to {host}: its address or the token holds characters that HTTP does not "
    "allow; connect again with the token alone"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request that the forge accepted (2xx)."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def document(self) -> Any:
        """Return the JSON of the body. Raises ValueError."""
        return json.loads(self.body) if self.body else None


class Transport:
    """Sends requests to one forge. `needs` says which permission the token must have, for the message
    of an error."""

    def __init__(self, client: httpx.AsyncClient, base: str, *, needs: str) -> None:
        self._client = client
        self._origin = _origin(base)
        self._needs = needs

    async def send(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        """Send a request, and follow redirects within the forge. Raises Refused, ForgeAway."""
        for _ in range(MOST_REDIRECTS + 1):
            if _origin(url) != self._origin:
                raise Refused(
                    f"{self._host} sends requests on to {plain(urlsplit(url).netloc)[:SHOWN]}, which "
                    "does not get the token; connect the repository by its present address"
                )
            answer = await self._once(method, url, headers, body)
            place = answer.headers.get("location")
            if answer.status not in (301, 302, 307, 308) or place is None:
                return self._accept(answer)
            if method != "GET" and answer.status in (301, 302):
                break
            url = urljoin(url, place)
        raise Refused(f"{self._host} has moved the repository; connect it by its present address")

    async def _once(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        request = self._build(method, url, {**headers, "accept-encoding": "identity"}, body)
        try:
            async with asyncio.timeout(DEADLINE_S):
                response = await self._client.send(request, stream=True, follow_redirects=False)
                try:
                    return Answer(response.status_code, response.headers, await _read(response))
                finally:
                    await response.aclose()
        except httpx.LocalProtocolError:
            raise Refused(BAD_REQUEST.format(host=self._host)) from None  # it could show the token
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            why = plain(str(error))[:SHOWN] or type(error).__name__
            raise ForgeAway(
                f"{self._host} does not answer ({why}); try again later", pause_s=PAUSE_S
            ) from error

    def _build(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> httpx.Request:
        try:
            return self._client.build_request(
                method, url, headers=dict(headers), content=body or None
            )
        except (httpx.InvalidURL, ValueError):
            raise Refused(BAD_REQUEST.format(host=self._host)) from None

    def _accept(self, answer: Answer) -> Answer:
        """Return an answer with a status of success. Raises Refused, ForgeAway for all others."""
        status = answer.status
        if 200 <= status < 300:
            return answer
        said = _message(answer)
        pause = _asked_pause(answer, said)
        if status == 429 or (status == 403 and pause is not None):
            raise ForgeAway(
                f"{self._host} limits the rate of requests; try again later",
                pause_s=pause or 60.0,
            )
        if status >= 500 or status in (408, 425):
            raise ForgeAway(
                f"{self._host} answers {status}; try again later", pause_s=pause or PAUSE_S
            )
        raise ForgeRefusal(status, f"{self._host} answers {status}{said}; {self._advice(status)}")

    def _advice(self, status: int) -> str:
        if status == 401:
            return "the token is wrong or has expired: make a new one and connect again"
        if status in (403, 404):
            return (
                f"either the repository does not exist, or the token may not do this: {self._needs}"
            )
        return f"check the address of the repository, and the token: {self._needs}"

    @property
    def _host(self) -> str:
        return urlsplit(self._origin).netloc


class ForgeRefusal(Refused):
    """A forge refused a request. `answered` is the status of its answer."""

    def __init__(self, answered: int, message: str) -> None:
        super().__init__(message)
        self.answered = answered


async def _read(response: httpx.Response) -> bytes:
    held = bytearray()
    async for part in response.aiter_raw():
        held += part
        if len(held) > MOST_BYTES:
            raise httpx.ReadError(f"its answer has more than {MOST_BYTES} bytes")
    return bytes(held)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or default}"


def _message(answer: Answer) -> str:
    """The forge's own message as ` (...)`, or nothing. Long words are hidden, because one could be a
    token that the forge repeats."""
    try:
        document = answer.document()
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    parts = [document.get("message") or document.get("error"), document.get("errors")]
    said = " ".join(part if isinstance(part, str) else _inner(part) for part in parts if part)
    said = SECRET_WORD.sub("***", " ".join(plain(said[: 4 * SHOWN]).split()))
    return f" ({said[:SHOWN]})" if said else ""


def _inner(errors: object) -> str:
    """The messages of GitHub's list of errors."""
    found = errors if isinstance(errors, list) else [errors]
    texts = [one.get("message") if isinstance(one, dict) else one for one in found[:5]]
    return "; ".join(text for text in texts if isinstance(text, str))


def _asked_pause(answer: Answer, said: str) -> float | None:
    """How long the forge asks to wait, in seconds; None when it does not ask."""
    if after := answer.headers.get("retry-after"):
        seconds = _number(after)
        if seconds is None:
            try:
                seconds = parsedate_to_datetime(after).timestamp() - time.time()
            except (ValueError, OverflowError):
                seconds = 60.0
        return _cap(seconds)
    if answer.headers.get("x-ratelimit-remaining") == "0":
        reset = _number(answer.headers.get("x-ratelimit-reset", ""))
        return _cap(60.0 if reset is None else reset - time.time())
    return 60.0 if "rate limit" in said.lower() else None


def _number(text: str) -> float | None:
    text = text.strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _cap(seconds: float) -> float:
    return min(max(seconds, 1.0), LONGEST_PAUSE_S)
