"""The SDK's client keeps connections open, and a connection that the server has closed in the
meantime is not a failure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import http
from headrace.http import post_json

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"count": 1}'


class Server:
    """Answers requests; `leave` decides what happens to a connection after its first response."""

    def __init__(self, leave: Callable[["Server", asyncio.StreamWriter], None]) -> None:
        self.leave = leave
        self.connections = self.requests = 0
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for turn in range(10):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.requests += 1
                writer.write(ANSWER)
                await writer.drain()
                if turn == 0:
                    self.leave(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1/chat"
    finally:
        listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(url: str) -> dict[str, Any]:
    return await post_json(url, {"say": "x"}, key="k")


def stay(server: Server, writer: asyncio.StreamWriter) -> None:
    """Keep it open."""


def close(server: Server, writer: asyncio.StreamWriter) -> None:
    """Close it, as after an idle time-out: the next request finds the connection closed."""
    writer.close()
    server.closed.set()


async def test_a_connection_is_kept_for_the_next_request() -> None:
    server = Server(stay)
    async with serving(server) as url:
        for _ in range(3):
            assert await ask(url) == {"count": 1}
    assert (server.connections, server.requests) == (1, 3)


async def test_connections_that_the_server_gave_up_meanwhile_are_replaced() -> None:
    server = Server(close)
    async with serving(server) as url:
        await asyncio.gather(*(ask(url) for _ in range(4)))
        await server.closed.wait()
        assert await asyncio.gather(*(ask(url) for _ in range(4))) == [{"count": 1}] * 4
    assert (server.connections, server.requests) == (8, 8)


async def test_a_server_that_answers_nothing_is_an_error_and_is_not_asked_twice() -> None:
    asked = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionError, match="closed the connection"):
        await ask(f"http://127.0.0.1:{port}/v1/chat")
    listening.close()
    assert asked == 1


def test_a_loop_that_ends_leaves_no_connection_open() -> None:
    kept: list[asyncio.StreamWriter] = []

    async def once() -> None:
        async with serving(Server(stay)) as url:
            await ask(url)
            kept.extend(w for pool in (await http._idle()).values() for _, w in pool)

    before = set(http._kept)
    asyncio.run(once())
    assert [writer.is_closing() for writer in kept] == [True]
    assert set(http._kept) == before
