"""Addresses that are refused too often are turned away, and no others."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from infra.http import failed_auth_throttle as limits
from infra.http.failed_auth_throttle import FailedAuthThrottle
from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer

STRANGER, OTHER = "192.0.2.1", "192.0.2.2"
TOO_MANY = int(limits.REFUSED_AT_ONCE) + 1


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(address: str, count: int, *, clock: Clock) -> FailedAuthThrottle:
    found = FailedAuthThrottle(clock)
    for _ in range(count):
        found.refuse(address)
    return found


def test_an_address_that_is_refused_too_often_is_turned_away_for_a_while() -> None:
    clock = Clock()
    found = refused(STRANGER, TOO_MANY, clock=clock)
    assert found.must_leave(STRANGER)
    assert not found.must_leave(OTHER)
    clock.now += 1
    assert not found.must_leave(STRANGER)


def test_an_address_that_is_refused_now_and_then_is_answered() -> None:
    clock = Clock()
    found = FailedAuthThrottle(clock)
    for _ in range(10 * TOO_MANY):
        found.refuse(STRANGER)
        clock.now += 1 / limits.REFUSED_PER_S
        assert not found.must_leave(STRANGER)


def test_an_address_with_a_valid_api_key_is_served() -> None:
    clock = Clock()
    found = refused(STRANGER, TOO_MANY, clock=clock)
    found.welcome(STRANGER)
    assert not found.must_leave(STRANGER)
    clock.now += limits.WELCOME_S
    for _ in range(TOO_MANY):
        found.refuse(STRANGER)
    assert found.must_leave(STRANGER)


def test_a_flood_from_many_addresses_turns_all_of_them_away() -> None:
    clock = Clock()
    found = FailedAuthThrottle(clock)
    addresses = [f"192.0.2.{number}" for number in range(200)]
    for _ in range(int(limits.ALL_AT_ONCE) // len(addresses) + 1):
        for address in addresses:
            found.refuse(address)
    assert all(map(found.must_leave, addresses))
    assert not found.must_leave("198.51.100.1")
    clock.now += limits.CROWD_S
    assert not any(map(found.must_leave, addresses))


def test_a_network_of_ipv6_is_one_sender() -> None:
    found = refused("2001:db8::1", TOO_MANY, clock=Clock())
    assert found.must_leave("2001:db8::2")
    assert not found.must_leave("2001:db8:0:1::1")


def test_few_addresses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_ADDRESSES", 10)
    found = refused(STRANGER, TOO_MANY, clock=Clock())
    for number in range(10):
        found.refuse(f"198.51.100.{number}")
    assert not found.must_leave(STRANGER)


async def _hello(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"2"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(throttle: FailedAuthThrottle | None) -> AsyncIterator[int]:
    server = HttpServer(
        _hello, host="127.0.0.1", port=0, limits=ConnectionLimits(), throttle=throttle
    )
    await server.listen()
    task = asyncio.ensure_future(server.serve())
    try:
        yield server.port
    finally:
        server.stop()
        await task


async def ask(port: int, *, source: str) -> bytes:
    """The answer to a request from an address of this machine; b"" when there is none."""
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(source, 0), family=socket.AF_INET
            )
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer
    except ConnectionError:
        return b""


async def test_a_server_closes_the_connections_of_strangers() -> None:
    async with serving(refused("127.0.1.1", 2 * TOO_MANY, clock=Clock())) as port:
        assert await ask(port, source="127.0.1.1") == b""
        assert (await ask(port, source="127.0.1.2")).startswith(b"HTTP/1.1 200")


async def test_twin_without_the_count_they_are_served() -> None:
    async with serving(None) as port:
        assert (await ask(port, source="127.0.1.1")).startswith(b"HTTP/1.1 200")
