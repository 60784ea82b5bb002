"""Asks models of providers for chat completions and the like, over HTTP.

Each address is checked at the moment of dialling, an answer is bounded, and a redirect is refused. A
provider that limits the rate is asked again after the pause that it asks for, and one that is away after
growing pauses, until the deadline. The key is in no error and in no log.
"""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.model_api.providers.endpoints import check_base_url, is_own_server
from infra.model_api.providers.wire import ProviderAnswer, parse_completion, request_body
from infra.settings.git import AllowedAddresses
from infra.settings.network_policy import VARIABLE, NetworkPolicy
from schemas.errors import InvalidConfig, Refused, TransientError
from schemas.network import NetworkAddress
from schemas.sampling import Message, ProviderRef, ToolSpec
from schemas.secrets.secret_value import SecretValue
from schemas.text import plain

MOST_BYTES = 16 << 20
"""The largest answer that is read, unless a request says otherwise."""

MOST_IN_FLIGHT = 32
"""How many requests one server gets at the same time."""

MOST_SERVERS = 64
"""How many servers keep their connections. Configs name servers, so there may be any number of them.
Those that were used longest ago are closed first, and never while they have a request."""

CONNECT_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
SHOWN = 300
RETRIED = frozenset({408, 409, 425, 429})
ASKS_TO_WAIT = frozenset({429, 503, 529})
UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout)
OUT_OF_MONEY = ("insufficient_quota", "billing_hard_limit_reached", "insufficient_balance")
"""Codes of answers that waiting does not change, although their status is 429."""

MOST_DROPPED = 3
DROPPABLE = ("temperature", "top_p", "stop", "seed", "response_format")
"""Parameters that some models refuse. They are left out for such a model."""

LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}


class ProviderRefusal(Refused):
    """A provider refused a request for good. `answered` is the status of its answer."""

    def __init__(self, answered: int, message: str) -> None:
        super().__init__(message)
        self.answered = answered


class ProviderAway(TransientError):
    """A provider did not answer until the deadline, or limited the rate all the time. `is_waiting` is
    true if it could not be reached or asked to wait, and False if it failed in another way."""

    def __init__(self, message: str, *, is_waiting: bool = False) -> None:
        super().__init__(message)
        self.is_waiting = is_waiting


@dataclass(frozen=True, slots=True)
class _Request:
    """One attempt: the path below the base URL, the body, and the most bytes of its answer."""

    path: str
    body: object
    most_bytes: int = MOST_BYTES


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Server:
    """The state of one server: how many requests it has, until when it wants no more, and which
    parameters a model of it does not take."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.room = asyncio.Semaphore(MOST_IN_FLIGHT)
        self.num_requests = 0
        self.not_before = 0.0
        self._dropped: dict[str, set[str]] = {}

    def options_for(self, model: str, options: Mapping[str, object]) -> dict[str, object]:
        """The options that a model takes. A limit that it does not take gets its other name."""
        dropped = self._dropped.get(model, set())
        kept = {name: value for name, value in options.items() if name not in dropped}
        for name in LIMITS.keys() & dropped & options.keys():
            kept[LIMITS[name]] = options[name]
        return kept

    def drop(self, model: str, name: str | None, sent: Mapping[str, object]) -> bool:
        """Note that a model refuses a parameter. Returns False if it was not sent, because then nothing
        else can be left out."""
        dropped = self._dropped.setdefault(model, set())
        if name is None or name not in sent or name in dropped or len(dropped) >= MOST_DROPPED:
            return False
        dropped.add(name)
        return True


@dataclass(slots=True)
class _Call:
    """The attempts of one request: how long to wait after the next one, and how the last one ended.
    `is_waiting` is false from the moment when a request is sent, unless it ends by a call to wait."""

    pause_s: float
    last: str = ""
    is_waiting: bool = True

    async def rest(self, server: _Server, answer: _Answer | None) -> None:
        """Wait before the next attempt. A pause that the server asks for is that of all requests."""
        asked = _asked_pause(answer) if answer is not None else None
        if asked is not None:
            server.not_before = max(server.not_before, time.monotonic() + asked)
        wait = self.pause_s * (1 + random.random()) if asked is None else asked  # noqa: S311 - jitter
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(wait)


class ProviderClient:
    """Requests to providers. `network` is the operator's policy for servers other than the providers'
    own; None allows every address, for commands on the user's own machine. Close it with `aclose`."""

    def __init__(
        self,
        network: NetworkPolicy | None,
        *,
        resolve: Resolve = resolve,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._network = network
        self._resolve = resolve
        self._first_pause_s = first_pause_s
        self._servers: dict[str, _Server] = {}
        self._tls: ssl.SSLContext | None = None

    async def aclose(self) -> None:
        """Close all connections."""
        servers, self._servers = self._servers, {}
        await asyncio.gather(*(server.client.aclose() for server in servers.values()))

    async def complete(
        self,
        provider: ProviderRef,
        messages: Sequence[Message],
        *,
        key: SecretValue | None,
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, object] = {},
        deadline_s: float | None = None,
    ) -> ProviderAnswer:
        """Ask for one answer. `options` are further parameters, such as `temperature` or
        `response_format`. The deadline, by default the provider's `timeout_s`, is that of all attempts
        together. Raises ProviderRefusal, ProviderAway, and InvalidConfig when the address may not be
        reached."""

        def request(options: Mapping[str, object]) -> _Request:
            body = request_body(provider, messages, tools=tools, options=options)
            return _Request("chat/completions", body)

        answer = await self._ask(provider, request, key=key, options=options, deadline_s=deadline_s)
        return parse_completion(answer, provider)

    async def ask(
        self,
        provider: ProviderRef,
        path: str,
        body: object,
        *,
        key: SecretValue | None,
        deadline_s: float | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> bytes:
        """Send a body of JSON to a path below the base URL, and return the answer. Deadline and errors
        are those of `complete`."""
        request = _Request(path, body, most_bytes)
        return await self._ask(
            provider, lambda _: request, key=key, options={}, deadline_s=deadline_s
        )

    async def _ask(
        self,
        provider: ProviderRef,
        request_with: Callable[[Mapping[str, object]], _Request],
        *,
        key: SecretValue | None,
        options: Mapping[str, object],
        deadline_s: float | None,
    ) -> bytes:
        server = self._server(provider.base_url)
        left_s = provider.timeout_s if deadline_s is None else deadline_s
        call = _Call(self._first_pause_s)
        server.num_requests += 1
        try:
            async with asyncio.timeout(left_s):
                await self._close_idle()
                while True:
                    wanted = server.options_for(provider.model, options)
                    request = request_with(wanted)
                    answer = await self._attempt(server, provider, request, key=key, call=call)
                    if answer is not None:
                        if answer.status == 200:
                            return answer.body
                        if server.drop(provider.model, _unsupported(answer), wanted):
                            continue
                        if not _is_retried(answer):
                            raise _refusal(provider, answer, call)
                    await call.rest(server, answer)
        except TimeoutError:
            last = f" ({call.last})" if call.last else ""
            raise ProviderAway(
                f"{provider.name} did not answer within {left_s:g} s{last}; try again later",
                is_waiting=call.is_waiting,
            ) from None
        finally:
            server.num_requests -= 1

    async def _close_idle(self) -> None:
        """Close servers without a request, until MOST_SERVERS are left."""
        idle = [url for url, server in self._servers.items() if not server.num_requests]
        extra = idle[: max(0, len(self._servers) - MOST_SERVERS)]
        for server in [self._servers.pop(url) for url in extra]:
            await server.client.aclose()

    async def _attempt(
        self,
        server: _Server,
        provider: ProviderRef,
        request: _Request,
        *,
        key: SecretValue | None,
        call: _Call,
    ) -> _Answer | None:
        """The answer to one attempt, or None when there was none."""
        try:
            answer = await self._send(server, provider, request, key=key, call=call)
        except (httpx.HTTPError, TransientError, OSError) as error:
            call.is_waiting = isinstance(error, (*UNREACHABLE, TransientError))
            call.last = _hide(plain(str(error)), key)[:SHOWN] or type(error).__name__
            return None
        call.is_waiting = answer.status in ASKS_TO_WAIT
        call.last = f"it answered {answer.status}{_message(answer, key)}"
        return answer

    async def _send(
        self,
        server: _Server,
        provider: ProviderRef,
        asked: _Request,
        *,
        key: SecretValue | None,
        call: _Call,
    ) -> _Answer:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key.reveal()}"
        try:
            request = server.client.build_request(
                "POST",
                f"{provider.base_url}/{asked.path}",
                headers=headers,
                content=json.dumps(asked.body).encode(),
            )
        except (httpx.InvalidURL, ValueError, TypeError):
            raise _bad_request(provider) from None  # it could show the key
        async with server.room:
            await asyncio.sleep(max(0.0, server.not_before - time.monotonic()))
            call.is_waiting = False
            try:
                response = await server.client.send(request, stream=True, follow_redirects=False)
            except httpx.LocalProtocolError:
                raise _bad_request(provider) from None
            try:
                held = await _read(response, most_bytes=asked.most_bytes)
                return _Answer(response.status_code, response.headers, held)
            finally:
                await response.aclose()

    def _server(self, base_url: str) -> _Server:
        """The server at a base URL. Raises InvalidConfig when it may not be reached."""
        if base_url not in self._servers:
            address = check_base_url(base_url)
            dialling = CheckedDialling(
                self._allowed_addresses(base_url, address),
                resolve=self._resolve,
                advice=f"let the operator allow that very address with {VARIABLE}",
            )
            if self._tls is None:
                self._tls = httpx.create_ssl_context()
            limits = httpx.Limits(max_connections=MOST_IN_FLIGHT)
            client = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                transport=CheckedTransport(dialling, tls=self._tls, limits=limits),
                cookies=no_cookies(),
            )
            self._servers[base_url] = _Server(client)
        server = self._servers[base_url] = self._servers.pop(base_url)  # the last one that was used
        return server

    def _allowed_addresses(self, base_url: str, address: NetworkAddress) -> AllowedAddresses:
        if self._network is None:
            return AllowedAddresses(loopback=True, private=True, hosts=frozenset({address.host}))
        if is_own_server(base_url):
            return AllowedAddresses()
        if not self._network.may_be_reached(address):
            raise InvalidConfig(
                f"the operator does not allow connections to {address}; ask for {VARIABLE}=*={address}"
            )
        return AllowedAddresses(networks=self._network.networks(address.port))


def _unsupported(answer: _Answer) -> str | None:
    """The parameter that a model does not take, if that is what it answers."""
    if answer.status not in (400, 422):
        return None
    error = _error(answer)
    text = f"{error.get('param')} {error.get('message')}"
    if "support" not in text and "deprecated" not in text:
        return None
    return next((name for name in (*DROPPABLE, *LIMITS) if name in text), None)


def _refusal(provider: ProviderRef, answer: _Answer, call: _Call) -> ProviderRefusal:
    text = f"{provider.name}: {call.last}; {_advice(answer, provider)}"
    return ProviderRefusal(answer.status, text)


def _is_retried(answer: _Answer) -> bool:
    if answer.status == 429:
        return _error(answer).get("code") not in OUT_OF_MONEY
    return answer.status in RETRIED or answer.status >= 500


def _error(answer: _Answer) -> Mapping[str, Any]:
    """The error object of an answer; empty when it has none."""
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    if isinstance(document, list) and document:  # Gemini's form
        document = document[0]
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return error
    return {"message": error} if isinstance(error, str) else {}


def _message(answer: _Answer, key: SecretValue | None) -> str:
    message = _error(answer).get("message")
    if not isinstance(message, str):
        return ""
    return f" ({_hide(' '.join(plain(message[: 4 * SHOWN]).split()), key)[:SHOWN]})"


def _hide(text: str, key: SecretValue | None) -> str:
    """The text without the key, or its beginning and end, which some providers repeat."""
    if key is None:
        return text
    value = key.reveal()
    words = (
        "***" if "*" in word and word[:3] == value[:3] else word
        for word in text.replace(value, "***").split(" ")
    )
    return " ".join(words)


def _advice(answer: _Answer, provider: ProviderRef) -> str:
    match answer.status:
        case 401 | 403 if provider.secret is None:
            return (
                "it asks for an API key; store one as a secret, and name that secret with the model"
            )
        case 401 | 403:
            return f"set the secret {provider.secret} to a key that may use this model"
        case 402 | 429:
            return "the account of the key has no money or quota left"
        case 404:
            return "check the name of the model and the base URL"
        case status if 300 <= status < 400:
            return (
                "it sends requests on to another address, which does not get the key; use that one"
            )
        case _:
            return "check the model, its parameters and the length of the conversation"


def _asked_pause(answer: _Answer) -> float | None:
    """How long the provider asks to wait, in seconds; None when it does not ask."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = answer.headers.get(name, "").strip()
        if text.replace(".", "", 1).isdigit() and text.isascii() and len(text) < 16:
            return min(float(text) / unit, LONGEST_PAUSE_S)
    return None


async def _read(response: httpx.Response, *, most_bytes: int) -> bytes:
    held = bytearray()
    async for part in response.aiter_raw():
        held += part
        if len(held) > most_bytes:
            raise httpx.ReadError(f"the answer has more than {most_bytes} bytes")
    return bytes(held)


def _bad_request(provider: ProviderRef) -> ProviderRefusal:
    return ProviderRefusal(
        400,
        f"no request can be made to {provider.name}: its address or its key holds characters that HTTP "
        "does not allow; set the secret to the key alone",
    )
