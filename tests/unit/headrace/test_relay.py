"""The relay passes bytes on unchanged, with bounded memory and a bounded number of connections."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace import relay
from tests.kit.sockets import relayed

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def upstream(path: Path, serve: Serve) -> AsyncIterator[Path]:
    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield path
    finally:
        server.close()


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with everything that was received, after its end."""
    writer.write(await reader.read())
    writer.close()


async def test_bytes_pass_unchanged_in_both_directions(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    async with upstream(tmp_path / "s", echo) as path, relayed(path) as url:
        reader, writer = await connect(url)
        writer.write(data)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == data
        writer.close()


async def test_no_more_is_read_than_the_other_end_takes(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # nothing else stops it
        await go.wait()
        writer.close()

    async with upstream(tmp_path / "s", wait) as path, relayed(path) as url:
        client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        client.settimeout(0)
        sent = 0
        for _ in range(200):
            try:
                sent += client.send(b"x" * (1 << 20))
            except BlockingIOError:
                await asyncio.sleep(0.005)
        assert sent < 20 << 20, "the buffers of the sockets, and little more"
        go.set()
        client.close()


async def test_connections_beyond_the_most_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MOST_CONNECTIONS", 2)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        await reader.read()
        writer.close()

    async with upstream(tmp_path / "s", greet) as path, relayed(path) as url:
        first, second, third = [await connect(url) for _ in range(3)]
        assert await first[0].readline() == await second[0].readline() == b"hello\n"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(third[0].readline(), 0.1)
        first[1].close()
        assert await asyncio.wait_for(third[0].readline(), 10) == b"hello\n"
        for _, writer in (second, third):
            writer.close()


async def test_without_a_gateway_a_connection_is_closed(tmp_path: Path) -> None:
    async with relayed(tmp_path / "nothing") as url:
        reader, writer = await connect(url)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


def full(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose backlog is full, and the connections in it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    waiting = []
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(0)
        waiting.append(client)
        try:
            client.connect(str(path))
        except BlockingIOError:
            return listener, waiting


async def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    listener, waiting = full(tmp_path / "s")
    with listener:
        connecting = asyncio.ensure_future(relay.connect(str(tmp_path / "s")))
        await asyncio.sleep(0.05)
        assert not connecting.done()
        listener.accept()[0].close()
        (await asyncio.wait_for(connecting, 10)).close()
        for client in waiting:
            client.close()


async def test_twin_asyncio_takes_it_for_connected(tmp_path: Path) -> None:
    listener, waiting = full(tmp_path / "s")
    with listener:
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        with pytest.raises(OSError, match="not connected"):
            writer.get_extra_info("socket").getpeername()
        writer.close()
        for client in waiting:
            client.close()


def test_the_proxy_of_the_rollout_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dict(os.environ)
    monkeypatch.setattr(os, "environ", {**kept, "HTTPS_PROXY": "http://ours:1"})
    relay.use_as_proxy(8)
    assert os.environ["HTTPS_PROXY"] == "http://ours:1"
    assert os.environ["https_proxy"] == os.environ["ALL_PROXY"] == "http://127.0.0.1:8"
    assert "127.0.0.1" in os.environ["NO_PROXY"]
