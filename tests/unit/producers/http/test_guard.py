"""The guard over a real server and over bare ASGI: what is refused before a body is read, what is no
HTTP, and whose address is recorded."""

import asyncio
from collections.abc import MutableMapping
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from infra.http.failed_auth_throttle import REFUSED_AT_ONCE
from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from producers.dashboard.pages.access import sign_in
from producers.http.app import create_app
from producers.http.client_address import ClientAddresses
from tests.kit.application import API_KEY, Application

pytestmark = pytest.mark.postgres

Message = MutableMapping[str, Any]
PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))


async def converse(app: Application, scope: dict[str, Any], *received: Message) -> list[Message]:
    """What the application sends when it receives these messages."""
    messages, sent = list(received), []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await app.app(scope, receive, send)
    return sent


async def test_a_websocket_is_closed_without_a_look_at_its_api_key(app: Application) -> None:
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {API_KEY}".encode())]
    for path in ("/healthz", "/api/v1/runs", "/webhooks/w"):
        scope = {"type": "websocket", "path": path, "headers": headers, "query_string": b""}
        [answer] = await converse(app, scope, {"type": "websocket.connect"})
        assert answer["type"] == "websocket.close"
        assert answer["code"] == 1008


async def test_other_kinds_of_scopes_reach_nothing(app: Application) -> None:
    steps = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    answers = await converse(app, {"type": "lifespan"}, *steps)
    assert [one["type"] for one in answers] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert await converse(app, {"type": "something"}) == []


@pytest.mark.parametrize("api_key", ["", "no", f"hr_{'a' * 10}_{'x' * 49}"])
async def test_a_stranger_is_answered_before_a_body_arrives(app: Application, api_key: str) -> None:
    server = HttpServer(app.app, host="127.0.0.1", port=0, limits=ConnectionLimits())
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    sent = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    writer.write(
        f"POST /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n{sent}"
        "Content-Length: 8000000\r\n\r\n".encode()
    )
    async with asyncio.timeout(30):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()
    writer.close()
    server.stop()
    await asyncio.wait_for(serving, 10)


async def test_an_api_key_without_the_scope_is_answered_before_a_body_is_read(
    app: Application,
) -> None:
    made = await app.post("/api-keys", {"name": "reader", "scopes": ["read"]})
    text = made.json()["secret"]

    async def never() -> Message:
        raise AssertionError("the body was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {text}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/runs", "headers": headers}
    await app.app({**scope, "query_string": b"", "raw_path": b"", "root_path": ""}, never, send)
    assert sent[0]["status"] == 403
    assert (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.parametrize(
    ("client", "forwarded", "address"),
    [
        ("192.0.2.7", ["198.51.100.1"], "192.0.2.7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["1.2.3.4, 198.51.100.1, 10.0.0.9"], "198.51.100.1"),
        ("10.0.0.1", ["1.2.3.4", "198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["1.2.3.4, <script>"], "10.0.0.1"),
        ("10.0.0.1", ["1.2.3.4, <script>, 10.0.0.9"], "10.0.0.9"),
        ("2001:db8::1", ["2001:db9::7"], "2001:db9::7"),
        ("10.0.0.1", ["8.8.8.8," * 100_000], "10.0.0.1"),
    ],
)
def test_a_forwarded_address_counts_only_behind_a_trusted_proxy(
    client: str, forwarded: list[str], address: str
) -> None:
    headers = Headers(raw=[(b"x-forwarded-for", value.encode()) for value in forwarded])
    scope = {"client": (client, 1234)}
    assert ClientAddresses(PROXIES).of(scope, headers) == address
    assert ClientAddresses(()).of(scope, headers) == client


async def test_the_address_behind_a_proxy_is_in_the_audit_list(app: Application) -> None:
    settings = replace(app.services.settings, trusted_proxies=(ip_network("127.0.0.0/8"),))
    object.__setattr__(app.services, "settings", settings)
    behind = create_app(app.services)
    headers = [
        (b"host", b"127.0.0.1"),
        (b"authorization", b"Bearer no"),
        (b"x-forwarded-for", b"198.51.100.1"),
    ]
    scope = {"type": "http", "method": "GET", "path": "/api/v1/runs", "headers": headers}
    app.app = behind
    [start, _] = await converse(app, {**scope, "query_string": b"", "client": ("127.0.0.1", 1)})
    assert start["status"] == 401
    found = (await app.get("/audit"))["audit"]
    assert "198.51.100.1" in {entry["address"] for entry in found}


async def test_the_api_key_of_metrics_reads_metrics_only(app: Application) -> None:
    object.__setattr__(
        app.services, "settings", replace(app.services.settings, metrics_key="for-prometheus")
    )
    headers = {"Authorization": "Bearer for-prometheus"}
    assert (await app.api.get("/metrics", headers=headers)).status_code == 200
    for path in ("/api/v1/runs", "/api/v1/status", "/api/v1/api-keys"):
        assert (await app.api.get(path, headers=headers)).status_code == 403


async def refuse_many(app: Application) -> None:
    for _ in range(int(REFUSED_AT_ONCE) + 50):
        answer = await app.api.get("/api/v1/runs", headers={"Authorization": "Bearer no"})
        assert answer.status_code == 401


async def test_refused_requests_are_counted_until_one_has_a_valid_api_key(app: Application) -> None:
    throttle = app.services.throttle
    await refuse_many(app)
    assert throttle.must_leave("127.0.0.1")
    assert (await app.api.get("/api/v1/runs")).status_code == 200
    assert not throttle.must_leave("127.0.0.1")


async def test_a_form_with_a_wrong_api_key_counts_and_reading_the_form_excuses_nothing(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_in, "REST_S", 0.0)
    throttle, here = app.services.throttle, {"Origin": str(app.api.base_url)}
    for _ in range(int(REFUSED_AT_ONCE) + 50):
        answer = await app.api.post("/login", data={"api_key": "no"}, headers=here)
        assert answer.status_code == 401
    assert throttle.must_leave("127.0.0.1")
    assert (await app.api.get("/login")).status_code == 200
    assert throttle.must_leave("127.0.0.1")


async def test_those_that_a_trusted_proxy_passes_on_are_not_counted(app: Application) -> None:
    settings = replace(app.services.settings, trusted_proxies=(ip_network("127.0.0.0/8"),))
    services = replace(app.services, settings=settings)
    transport = httpx.ASGITransport(create_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as api:
        await refuse_many(replace(app, api=api))
    assert not services.throttle.must_leave("127.0.0.1")
