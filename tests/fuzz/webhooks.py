"""Mutated webhooks against the real application: nothing unsigned is accepted, nothing is answered 5xx.

A request begins as a valid delivery and is mutated a few times: its body, its headers, its method, its
path, its pieces. Afterwards it is signed again or not. Whether it is authentic is computed here, without
any code of the endpoint.
"""

import hashlib
import hmac
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote_plus
from uuid import UUID

WORKSPACE, SECRET = "fuzzed", "a secret for the fuzz test"
SHAS = ("0" * 40, "a" * 40, "b" * 40)
SIGNATURE = b"x-hub-signature-256"
STRANGE_REFS = (
    "refs/heads/--upload-pack=x",
    "refs/heads/\0",
    "refs/heads/" + "x" * 9000,
    "main",
    "",
    "refs/heads/\ud800",
    "refs/tags/main",
    "refs/heads/ä/😀",
)
STRANGE_BODIES = (
    b"",
    b"null",
    b"[]",
    b"{" * 5000,
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"ref": 1e999}',
    b'{"ref": NaN}',
    b"\xff\xfe" * 50,
    b'{"ref":"' + b"\\u0000" * 100 + b'"}',
    b"payload=" + b"%" * 100,
    b"1" * 5000,
)
STRANGE_VALUES = (b"", b"\xff\xfe", b"a" * 5000, b"sha256=", b"push\0", b"0", b"-1", b"1e9")


@dataclass(frozen=True)
class Delivery:
    """A request, as ASGI gives it to an application. `pieces` is into how many the body is cut."""

    method: str = "POST"
    path: str = f"/webhooks/{WORKSPACE}"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    pieces: int = 1
    is_cut_off: bool = False

    def signature(self) -> bytes:
        return (
            b"sha256=" + hmac.new(SECRET.encode(), self.body, hashlib.sha256).hexdigest().encode()
        )

    def is_authentic(self) -> bool:
        """Whether the request carries exactly one signature of its whole body."""
        found = [value for name, value in self.headers if name == SIGNATURE]
        return not self.is_cut_off and found == [self.signature()]

    def sign(self) -> "Delivery":
        kept = tuple(header for header in self.headers if header[0] != SIGNATURE)
        return replace(self, headers=(*kept, (SIGNATURE, self.signature())))


def valid(draw: random.Random) -> Delivery:
    """A valid push, with an id of its own."""
    payload: dict[str, Any] = {
        "ref": draw.choice(("refs/heads/main", "refs/heads/a/b", "refs/tags/v1")),
        "before": draw.choice(SHAS),
        "after": draw.choice(SHAS[1:]),
        "forced": draw.random() < 0.1,
        "deleted": draw.random() < 0.1,
        "pusher": {"name": "ada"},
        "commits": [],
    }
    identity = UUID(int=draw.getrandbits(128), version=4)
    headers = (
        (b"host", b"127.0.0.1:8420"),
        (b"content-type", b"application/json"),
        (b"x-github-event", b"push"),
        (b"x-github-delivery", str(identity).encode()),
    )
    return Delivery(headers=headers, body=json.dumps(payload).encode()).sign()


def _flip_bytes(one: Delivery, draw: random.Random) -> Delivery:
    body = bytearray(one.body)
    for _ in range(draw.randint(1, 8)):
        if body:
            body[draw.randrange(len(body))] = draw.randrange(256)
    return replace(one, body=bytes(body))


def _cut_body(one: Delivery, draw: random.Random) -> Delivery:
    return replace(one, body=one.body[: draw.randint(0, len(one.body))])


def _replace_body(one: Delivery, draw: random.Random) -> Delivery:
    return replace(one, body=draw.choice(STRANGE_BODIES))


def _change_field(one: Delivery, draw: random.Random) -> Delivery:
    try:
        document = json.loads(one.body)
    except (ValueError, RecursionError):
        return one
    if not isinstance(document, dict):
        return one
    strange: tuple[Any, ...] = (None, 7, [], {}, True, "x" * 3000, -1, *STRANGE_REFS, *SHAS)
    key = draw.choice(("ref", "before", "after", "forced", "deleted", "pusher", "new"))
    if draw.random() < 0.2:
        document.pop(key, None)
    else:
        document[key] = draw.choice(strange)
    return replace(one, body=json.dumps(document).encode())


def _as_form(one: Delivery, draw: random.Random) -> Delivery:
    body = b"payload=" + quote_plus(one.body).encode()
    if draw.random() < 0.3:
        body += draw.choice((b"&payload=x", b"&a=b" * 50, b"&%ff=%00"))
    form = (b"content-type", b"application/x-www-form-urlencoded")
    kept = tuple(header for header in one.headers if header[0] != b"content-type")
    return replace(one, body=body, headers=(*kept, form))


def _drop_header(one: Delivery, draw: random.Random) -> Delivery:
    if not one.headers:
        return one
    place = draw.randrange(len(one.headers))
    return replace(one, headers=one.headers[:place] + one.headers[place + 1 :])


def _double_header(one: Delivery, draw: random.Random) -> Delivery:
    if not one.headers:
        return one
    name, value = draw.choice(one.headers)
    again = value if draw.random() < 0.5 else draw.choice(STRANGE_VALUES)
    return replace(one, headers=(*one.headers, (name, again)))


def _change_header(one: Delivery, draw: random.Random) -> Delivery:
    if not one.headers:
        return one
    place = draw.randrange(len(one.headers))
    name, value = one.headers[place]
    strange = (*STRANGE_VALUES, value.upper(), value + b" ", value[:-1], b"ping", b"issues", b"*/*")
    changed = (name, draw.choice(strange))
    return replace(one, headers=(*one.headers[:place], changed, *one.headers[place + 1 :]))


def _add_header(one: Delivery, draw: random.Random) -> Delivery:
    names = (b"x-hub-signature", b"content-length", b"x-gitlab-token", b"traceparent", b"expect")
    values = (*STRANGE_VALUES, b"sha1=" + b"0" * 40, SECRET.encode(), b"99999999999")
    return replace(one, headers=(*one.headers, (draw.choice(names), draw.choice(values))))


def _change_target(one: Delivery, draw: random.Random) -> Delivery:
    paths = ("/webhooks/", "/webhooks/unknown", "/webhooks/../x", "/webhooks/a/b", "/webhooks/\0")
    long = "/webhooks/" + "y" * 500
    if draw.random() < 0.3:
        return replace(one, method=draw.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "X")))
    return replace(one, path=draw.choice((*paths, long)))


def _cut_pieces(one: Delivery, draw: random.Random) -> Delivery:
    return replace(one, pieces=draw.randint(2, 9), is_cut_off=draw.random() < 0.2)


MUTATIONS: tuple[Callable[[Delivery, random.Random], Delivery], ...] = (
    _flip_bytes,
    _cut_body,
    _replace_body,
    _change_field,
    _as_form,
    _drop_header,
    _double_header,
    _change_header,
    _add_header,
    _change_target,
    _cut_pieces,
)


def mutate(draw: random.Random) -> Delivery:
    """A valid delivery after one to four mutations. About half are signed again."""
    one = valid(draw)
    for _ in range(draw.randint(1, 4)):
        one = draw.choice(MUTATIONS)(one, draw)
    return one.sign() if draw.random() < 0.5 else one


async def send(app: Any, one: Delivery) -> int | None:
    """Give a request to an ASGI application. Returns the status of its answer, or None when it gave
    none, which is right only if the sender has gone."""
    size = max(1, -(-len(one.body) // one.pieces))
    pieces = [one.body[at : at + size] for at in range(0, len(one.body), size)] or [b""]
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]
    if one.is_cut_off:
        messages[-1:] = [{"type": "http.disconnect"}]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def answer(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": one.method,
        "scheme": "http",
        "path": one.path,
        "raw_path": one.path.encode(errors="replace"),
        "query_string": b"",
        "root_path": "",
        "headers": list(one.headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8420),
    }
    await app(scope, receive, answer)
    return statuses[0] if statuses else None


@dataclass
class Findings:
    """What a fuzz run saw: answers by status, and the requests that were answered wrongly."""

    statuses: Counter[int | None] = field(default_factory=Counter)
    authentic: int = 0
    wrong: list[tuple[int | None, Delivery]] = field(default_factory=list)


async def fuzz(app: Any, *, seed: int, count: int) -> Findings:
    """Send mutated requests, and last a valid one, which must be accepted."""
    draw, found = random.Random(seed), Findings()
    for _ in range(count):
        one = mutate(draw)
        status = await send(app, one)
        authentic = one.is_authentic()
        found.statuses[status] += 1
        found.authentic += authentic
        is_wrong = status is None if not one.is_cut_off else False
        if status is not None:
            is_wrong = status >= 500 or (not authentic and status < 300)
        if is_wrong:
            found.wrong.append((status, one))
    last = valid(draw)
    if (status := await send(app, last)) != 202:
        found.wrong.append((status, last))
    return found
