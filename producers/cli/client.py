"""The HTTP client of the command line: the server's address, its API key, retries and failures.

Connection errors are retried. A write always carries an Idempotency-Key, and its retries carry the
same key, so a lost response never makes a second run. A write whose response was lost is retried for
longer than one that never connected, because it may have been done. When the server cannot be reached,
or refuses a request, the client raises a Failure with the server's own code and issues.
"""

import hashlib
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit
from uuid import uuid4

import httpx

from infra.settings.s3 import is_public_endpoint
from infra.settings.settings import Settings
from producers.cli.display.output import Document
from producers.cli.errors import Failure
from schemas.errors import Issue
from schemas.toml.finite import non_finite_issues

PREFIX = "/api/v1"

LOGINS = "logins.json"
"""The file in HEADRACE_HOME with the API keys that `headrace login` stored, one for each server. Only
its owner may read it."""

BACKOFF_S = (0.1, 0.3, 0.6, 1.0)
"""Pauses between the attempts of one request."""
LOST_S = 30.0
"""How long a write is repeated after a response to it was lost, for example while a server restarts."""

LISTS = {
    "runs": "train list",
    "evals": "eval list",
    "datasets": "dataset list",
    "workspaces": "workspace list",
    "models": "model list",
    "deployments": "model list",
    "api-keys": "key list",
    "secrets": "secret list",
    "organisations": "member list",
    "people": "person list",
}
"""The first segment of a path -> the command that lists what a write there changes."""

SLOW_S = 3600.0
"""How long the server may take to archive, restore or delete a whole run."""

NEVER_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
"""The errors after which the server cannot have received the request."""

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain HTTP to this machine. To read the list of certificate authorities takes longer than most
requests, and without it no TLS connection is trusted."""

STORE_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
STORE_ERROR_CHARACTERS = 10_000
"""Where an S3 store says why it refuses a request."""

Parameters = Mapping[str, str | int | None]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The URL of the server, and the API key that it accepts."""

    url: str
    api_key: str | None

    @classmethod
    def from_environment(cls) -> "ServerAddress":
        """The address from the settings: HEADRACE_URL, and HEADRACE_API_KEY, or else the key that
        `headrace login` stored for this address, or else the local API key file."""
        settings = Settings.load(os.environ)
        stored = None if settings.api_key else read_login(settings.home, settings.url)
        return cls(settings.url, stored or settings.read_api_key())


class Client:
    """Requests to one server. `transport` is for tests."""

    def __init__(
        self, address: ServerAddress | None = None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.address = address or ServerAddress.from_environment()
        api_key = self.address.api_key
        local = self.address.url.startswith("http://127.0.0.1")
        self._transport = transport
        self._http = httpx.Client(
            base_url=self.address.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(60, connect=5),
            transport=transport,
            trust_env=not local,
            verify=NO_AUTHORITIES if local else True,
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def pages(
        self, path: str, items: str, parameters: Parameters | None = None
    ) -> Iterator[Document]:
        """All entries of the list at `path`, under the key `items` of each page. Raises Failure."""
        offset: int | None = 0
        while offset is not None:
            page = self.get(path, {"limit": 100, **(parameters or {}), "offset": offset})
            yield from page.get(items) or ()
            offset = page.get("next_offset") if page.get("has_more") else None

    def get(self, path: str, parameters: Parameters | None = None) -> Document:
        """GET a JSON object. Raises Failure."""
        query = {k: v for k, v in (parameters or {}).items() if v is not None}
        return self._answer(self._send("GET", path, params=query))

    def post(
        self, path: str, body: object = None, *, key: str | None = None, **parameters: str
    ) -> Document:
        """POST JSON under an idempotency key. Raises Failure."""
        _require_finite(body)
        headers = {"Idempotency-Key": key or uuid4().hex}
        content: Document = {} if body is None else {"json": body}
        with request_span("POST", path) as context:
            response = self._send(
                "POST", path, headers={**headers, **context}, params=parameters, **content
            )
        return self._answer(response)

    def post_slow(self, path: str, body: Document | None = None) -> Document:
        """POST a request that may take long, such as archiving a run. Raises Failure."""
        _require_finite(body)
        headers = {"Idempotency-Key": uuid4().hex}
        timeout = httpx.Timeout(SLOW_S, connect=5)
        return self._answer(
            self._send("POST", path, json=body or {}, headers=headers, timeout=timeout)
        )

    def put_json(self, path: str, body: Document) -> Document:
        """PUT JSON and return the response. Raises Failure."""
        _require_finite(body)
        return self._answer(self._send("PUT", path, json=body))

    def delete(self, path: str, **parameters: str) -> Document:
        """DELETE `path` and return the response. Raises Failure."""
        timeout = httpx.Timeout(SLOW_S, connect=5)
        return self._answer(self._send("DELETE", path, timeout=timeout, params=parameters))

    def post_file(self, path: str, file: Path, **parameters: str) -> Document:
        """POST the bytes of a file and return the response. Raises Failure."""
        return self._answer(
            self._send("POST", path, content=file.read_bytes(), params=parameters, timeout=600)
        )

    def put(self, path: str, stream: BinaryIO) -> Document:
        """PUT a stream, without reading all of it into memory, and return the response. Raises
        Failure."""
        return self._answer(self._send("PUT", path, content=stream, timeout=600))

    def put_signed(self, url: str, pieces: Iterator[bytes], size: int) -> str:
        """PUT bytes to a signed URL of the server or of its blob store, without the API key, and return
        their ETag. Raises Failure, with the code SIGNED_URL when the URL does not allow it."""
        place = urlsplit(url)
        origin = f"{place.scheme}://{place.netloc}"
        own = self._origin
        if origin != own and is_public_endpoint(own) and not is_public_endpoint(origin):
            raise Failure(
                "PLAIN_HTTP",
                f"the server names a URL at {origin}, and no data is sent there without TLS; set "
                "HEADRACE_S3_PUBLIC_ENDPOINT or HEADRACE_PUBLIC_URL of the server to an https address",
            )
        headers = {"Content-Length": str(size)}
        with self._without_api_key(url) as plain:
            try:
                answer = plain.put(url, content=pieces, headers=headers)
            except httpx.TransportError as error:
                if origin == own:
                    raise self.unreachable() from error
                raise Failure(
                    "UNREACHABLE", f"the blob store at {origin} did not answer"
                ) from error
        if answer.status_code >= 500 or answer.status_code == 429:
            raise Failure("UNREACHABLE", f"{origin} answered {answer.status_code}")
        if answer.is_error and origin != own and _document(answer) is None:
            said = STORE_MESSAGE.search(answer.text[:STORE_ERROR_CHARACTERS])
            why = said[1] if said else f"HTTP {answer.status_code}"
            raise Failure("SIGNED_URL", f"the blob store at {origin} refused the data: {why}")
        if answer.is_error:
            raise failure_from(answer)
        return str(answer.headers.get("etag", ""))

    @property
    def _origin(self) -> str:
        """The scheme, host and port of the server."""
        place = urlsplit(self.address.url)
        return f"{place.scheme}://{place.netloc}"

    def download_signed(self, url: str, target: Path) -> str:
        """GET a signed URL into a file, without the API key, and return the SHA-256. Raises Failure."""
        digest = hashlib.sha256()
        with self._without_api_key(url) as plain, target.open("wb") as file:
            try:
                with plain.stream("GET", url) as answer:
                    if answer.is_error:
                        answer.read()
                        raise failure_from(answer)
                    for chunk in answer.iter_bytes():
                        digest.update(chunk)
                        file.write(chunk)
            except httpx.TransportError as error:
                raise self.unreachable() from error
        return digest.hexdigest()

    def _without_api_key(self, url: str) -> httpx.Client:
        """A client for a signed URL."""
        return httpx.Client(
            transport=self._transport,
            trust_env=not url.startswith("http://127.0.0.1"),
            verify=NO_AUTHORITIES if url.startswith("http:") else True,
            timeout=httpx.Timeout(600, connect=10),
        )

    def download(self, path: str, target: Path) -> str:
        """GET bytes into a file and return their sha256. The file appears only when it is complete.
        Raises Failure."""
        digest = hashlib.sha256()
        scratch = target.with_name(f".{target.name}.part")
        try:
            with self.stream(path) as answer, scratch.open("wb") as file:
                for chunk in answer.iter_bytes():
                    digest.update(chunk)
                    file.write(chunk)
        except httpx.TransportError as error:
            raise self.unreachable() from error
        scratch.rename(target)
        return digest.hexdigest()

    @contextmanager
    def stream(
        self, path: str, *, headers: Mapping[str, str] | None = None, read_s: float = 60
    ) -> Iterator[httpx.Response]:
        """A response that the caller reads as it arrives. Raises Failure when the request fails, and
        httpx's errors while the response is read."""
        timeout = httpx.Timeout(read_s, connect=5)
        with self._http.stream("GET", _url(path), headers=headers, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                self._answer(answer)
            yield answer

    def ready(self) -> bool:
        """Whether the server answers /readyz with 200."""
        try:
            return self._http.get("/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def unreachable(self) -> Failure:
        return Failure(
            "UNREACHABLE",
            f"no Headrace server answers at {self.address.url}; start one with "
            "`headrace up --detach`, or set HEADRACE_URL to another",
        )

    def _answer_lost(self, path: str) -> Failure:
        shown = LISTS.get(path.strip("/").partition("/")[0], "status")
        return Failure(
            "ANSWER_LOST",
            f"the request was sent to {self.address.url}, but the answer was lost, and the server does "
            "not answer now; the request may have been done, so look at "
            f"`headrace {shown}` before you repeat the command",
        )

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send, and retry after a connection error or a 503. A write whose response was lost is retried
        for LOST_S. Raises Failure when no attempt gets a response."""
        retry_until = 0.0
        for number, pause_s in enumerate(chain(BACKOFF_S, repeat(BACKOFF_S[-1]))):
            last: httpx.Response | None = None
            try:
                last = self._http.request(method, _url(path), **options)
            except NEVER_SENT:
                pass
            except httpx.TransportError:
                if method != "GET" and not retry_until:
                    retry_until = time.monotonic() + LOST_S
            if last is not None and last.status_code != 503:
                return last
            if number >= len(BACKOFF_S) and time.monotonic() >= retry_until:
                break
            time.sleep(pause_s)
            _rewind(options.get("content"))
        if retry_until:
            raise self._answer_lost(path)
        if last is None:
            raise self.unreachable()
        return last

    def _answer(self, answer: httpx.Response) -> Document:
        if answer.is_error:
            raise failure_from(answer)
        document = _document(answer)
        if document is None:
            raise Failure(
                "BAD_ANSWER",
                f"the response of {self.address.url} is not Headrace's JSON; check that HEADRACE_URL is "
                "the address of a Headrace server",
            )
        return document


def _require_finite(body: object) -> None:
    """Raises Failure for `nan` and `inf`, which options accept as numbers and JSON does not have."""
    if issues := tuple(non_finite_issues("", body)):
        first = issues[0]
        raise Failure("VALIDATION", f"{first.key} {first.message}", issues=issues)


@contextmanager
def request_span(method: str, path: str) -> Iterator[Mapping[str, str]]:
    """Headers that make a request part of a trace span of this command. There are none unless
    OpenTelemetry's variables enable it, because its import takes longer than most commands."""
    if not Settings.load(os.environ).telemetry:
        yield {}
        return
    from infra import telemetry

    telemetry.export("cli")
    with telemetry.span(telemetry.COMMAND.format(method=method, path=path)) as context:
        yield {telemetry.PARENT: context} if context else {}
    telemetry.close()


def path_segment(text: str) -> str:
    """Quote a user's string as one segment of a URL path. A server would take the slashes in the metric
    of a checkpoint's name for the ends of segments, so they become dots."""
    name, chosen, metric = text.partition("@best:")
    return quote(name + chosen + metric.replace("/", "."), safe="@.:")


def failure_from(answer: httpx.Response) -> Failure:
    """The Failure that the problem document in a response describes."""
    problem = _document(answer) or {}
    if not isinstance(problem.get("code"), str):
        return _failure_of_another_program(answer)
    message = str(problem.get("detail") or problem.get("title") or f"HTTP {answer.status_code}")
    if answer.status_code == 401:
        message += (
            " (the API key is that of HEADRACE_API_KEY, else of `headrace login`, else of "
            "$HEADRACE_HOME/token)"
        )
    issues = tuple(
        Issue(str(i.get("key", "")), str(i.get("message", "")), i.get("did_you_mean"))
        for i in problem.get("issues") or ()
    )
    return Failure(str(problem["code"]), message, issues=issues)


def _failure_of_another_program(answer: httpx.Response) -> Failure:
    url = str(answer.url.copy_with(path="/", query=None)).rstrip("/")
    return Failure(
        "BAD_ANSWER",
        f"what answers at {url} is not Headrace (HTTP {answer.status_code}); stop it, or set "
        "HEADRACE_URL to the address of a Headrace server. If it is a proxy, read its log",
    )


def _document(answer: httpx.Response) -> Document | None:
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _url(path: str) -> str:
    return path if path.startswith("/api/") else PREFIX + path


def _rewind(content: object) -> None:
    seek = getattr(content, "seek", None)
    if seek is not None:
        seek(0)


def read_login(home: Path, url: str) -> str | None:
    """The API key for a server; None when there was no login, or when the file cannot be read."""
    return _read_logins(home).get(_login_place(url))


def store_login(home: Path, url: str, api_key: str) -> Path:
    """Keep the API key for a server in the place of an earlier one, and return the file."""
    return _write_logins(home, {**_read_logins(home), _login_place(url): api_key})


def forget_login(home: Path, url: str) -> None:
    """Forget the API key for a server."""
    _write_logins(
        home,
        {place: key for place, key in _read_logins(home).items() if place != _login_place(url)},
    )


def _login_place(url: str) -> str:
    return url.rstrip("/").lower()


def _read_logins(home: Path) -> dict[str, str]:
    try:
        document = json.loads((home / LOGINS).read_text())
    except (OSError, ValueError):
        return {}
    logins = document.get("logins") if isinstance(document, dict) else None
    found = logins if isinstance(logins, dict) else {}
    return {place: key for place, key in found.items() if isinstance(key, str)}


def _write_logins(home: Path, logins: Mapping[str, str]) -> Path:
    """Replace the file as a whole. A temporary file has mode 0600 from its first byte on."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = home / LOGINS
    with NamedTemporaryFile("w", dir=home, prefix=f".{LOGINS}", delete=False) as file:
        json.dump({"version": 1, "logins": logins}, file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    return path
