"""A client that still sends its body reads the answer."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from infra.http import graceful_close
from infra.http import limits as http_limits
from infra.http.limits import ConnectionLimits, LimitedProtocol
from infra.http.server import HttpServer

MIB = 1 << 20
BODY = 8 * MIB


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"2"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


@asynccontextmanager
async def serving(*, dropped: int) -> AsyncIterator[int]:
    limits = ConnectionLimits(dropped=dropped)
    server = HttpServer(_refuse, host="127.0.0.1", port=0, limits=limits)
    await server.listen()
    task = asyncio.ensure_future(server.serve())
    try:
        yield server.port
    finally:
        server.stop()
        await task


async def slow_body() -> AsyncIterator[bytes]:
    """A body whose second half is sent when the answer has arrived."""
    yield b"x" * (BODY // 2)
    await asyncio.sleep(0.2)
    yield b"x" * (BODY // 2)


async def post(port: int) -> int:
    """The status that an ordinary client reads. It sends the whole body first."""
    async with httpx.AsyncClient(timeout=60) as client:
        headers = {"content-length": str(BODY)}
        url = f"http://127.0.0.1:{port}/"
        return (await client.post(url, content=slow_body(), headers=headers)).status_code


async def test_a_client_that_sends_a_large_body_reads_the_answer() -> None:
    async with serving(dropped=2 * BODY) as port:
        assert [await post(port) for _ in range(3)] == [401] * 3
        assert await asyncio.gather(*(post(port) for _ in range(8))) == [401] * 8


async def test_twin_otherwise_its_connection_is_reset() -> None:
    async with serving(dropped=0) as port:
        with pytest.raises(httpx.TransportError):
            await post(port)


async def send(port: int, size: int) -> int:
    """Send a body for as long as that is possible. Returns how much of it was taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
    sent = 0
    try:
        async with asyncio.timeout(60):
            while sent < size:
                writer.write(b"x" * (64 << 10))
                await writer.drain()
                sent += 64 << 10
            await reader.read()
    except ConnectionError:
        pass
    writer.transport.abort()
    return sent


async def test_only_so_much_is_dropped() -> None:
    async with serving(dropped=MIB) as port:
        assert await send(port, 64 * MIB) < 32 * MIB


async def test_a_client_that_sends_nothing_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_close, "LINGER_S", 0.1)
    async with serving(dropped=MIB) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(keep_sending(writer), 60)
        writer.transport.abort()


async def keep_sending(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def test_only_so_many_connections_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MOST_LINGERING", 0)
    async with serving(dropped=2 * BODY) as port:
        with pytest.raises(httpx.TransportError):
            await post(port)


async def _kept_by_closed_connections() -> int:
    """The bytes of bodies that closed connections keep until Python looks for cycles."""
    gc.collect()
    gc.disable()
    try:
        async with serving(dropped=2 * BODY) as port:
            assert await asyncio.gather(*(post(port) for _ in range(4))) == [401] * 4
        closed = [one for one in gc.get_objects() if type(one) is LimitedProtocol]
        assert len(closed) >= 4
        return sum(len(one.cycle.body) for one in closed if one.cycle is not None)
    finally:
        gc.enable()


async def test_a_closed_connection_keeps_nothing_of_a_body() -> None:
    assert await _kept_by_closed_connections() == 0


async def test_twin_otherwise_it_keeps_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "_forget_body", lambda _: None)
    assert await _kept_by_closed_connections() > 0
