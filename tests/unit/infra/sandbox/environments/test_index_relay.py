"""uv reaches the hosts of the index and public addresses, and nothing else."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.sandbox.environments.index_relay import IndexRelay, proxies_of, without_login
from infra.sandbox.service.child import make_env_vars
from schemas.errors import Refused


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server on loopback that keeps what it receives, and answers "there". A connection may also end
    without a request."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nthere")
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


async def ask(path: Path, request: str) -> str:
    """What the relay says to a request."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{request}\r\n\r\n".encode())
    async with asyncio.timeout(30):
        said = await reader.read()
    writer.close()
    return said.decode()


async def internal(host: str, port: int) -> Sequence[str]:
    """A resolver that has internal addresses for all names but those of the index."""
    return ["10.0.0.7"]


async def nowhere(host: str, port: int) -> Sequence[str]:
    raise socket.gaierror("no such name")


async def test_the_host_of_the_index_is_reached_wherever_it_is() -> None:
    async with listening() as (port, heads):
        relay = IndexRelay(f"http://127.0.0.1:{port}/simple", environ={})
        async with relay.listen(group=None) as path:
            said = await ask(
                path, f"GET http://127.0.0.1:{port}/simple/one/?a=b HTTP/1.1\r\nProxy-X: 1"
            )
        assert said.endswith("there")
    assert heads == [b"GET /simple/one/?a=b HTTP/1.1\r\nConnection: close\r\n\r\n"]
    assert (relay.refused, relay.away) == (None, None)


@pytest.mark.parametrize(
    ("request_line", "shown"),
    [
        ("CONNECT 127.0.0.1:{port} HTTP/1.1", "127.0.0.1"),
        ("CONNECT 169.254.169.254:80 HTTP/1.1", "169.254.169.254"),
        ("CONNECT [::1]:{port} HTTP/1.1", "::1"),
        ("CONNECT files.example.com:443 HTTP/1.1", "10.0.0.7"),
        ("GET http://localhost:{port}/x.whl HTTP/1.1", "10.0.0.7"),
        ("CONNECT [::ffff:127.0.0.1]:{port} HTTP/1.1", "127.0.0.1"),
    ],
)
async def test_files_at_internal_addresses_are_not_reached(request_line: str, shown: str) -> None:
    async with listening() as (port, heads):
        relay = IndexRelay("https://index.example.com/simple", environ={}, resolve=internal)
        async with relay.listen(group=None) as path:
            said = await ask(path, request_line.format(port=port))
    assert said.startswith("HTTP/1.1 403 ")
    assert heads == []
    assert shown in str(relay.refused)
    assert "HEADRACE_PACKAGE_INDEX" in str(relay.refused)


async def test_a_strict_one_reaches_the_hosts_of_the_index_only() -> None:
    relay = IndexRelay("http://127.0.0.1:9/simple", environ={}, is_strict=True, resolve=nowhere)
    async with relay.listen(group=None) as path:
        said = await ask(path, "CONNECT public.example.com:443 HTTP/1.1")
        assert said.startswith("HTTP/1.1 403 ")
        said = await ask(path, "CONNECT 127.0.0.1:9 HTTP/1.1")
        assert said.startswith("HTTP/1.1 502 ")


async def test_a_strict_one_reaches_nothing_without_an_index_and_else_the_hosts_of_its_files() -> (
    None
):
    closed = IndexRelay(None, environ={}, is_strict=True, resolve=nowhere)
    async with closed.listen(group=None) as path:
        said = await ask(path, "CONNECT files.example.com:443 HTTP/1.1")
        assert said.startswith("HTTP/1.1 403 ")
    assert "name an index" in str(closed.refused)
    relay = IndexRelay(
        "https://index.example.com/simple",
        hosts=frozenset({"files.example.com"}),
        environ={},
        is_strict=True,
        resolve=nowhere,
    )
    async with relay.listen(group=None) as path:
        said = await ask(path, "CONNECT files.example.com:443 HTTP/1.1")
        assert said.startswith("HTTP/1.1 502 ")
        said = await ask(path, "CONNECT other.example.com:443 HTTP/1.1")
        assert said.startswith("HTTP/1.1 403 ")


async def test_without_a_name_the_first_host_is_the_index_and_others_must_share_its_address() -> (
    None
):
    async def split(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] if host.endswith(".mirror.example.com") else ["10.0.0.7"]

    async with listening() as (port, _):
        relay = IndexRelay(None, environ={}, resolve=split)
        async with relay.listen(group=None) as path:
            for host in ("index.mirror.example.com", "files.mirror.example.com"):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            said = await ask(path, f"CONNECT internal.example.com:{port} HTTP/1.1")
            assert said.startswith("HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "request_line",
    ["x", "CONNECT nothing HTTP/1.1", "GET ftp://a/b HTTP/1.1", "GET /x HTTP/1.1", "a" * 70_000],
)
async def test_a_request_that_is_not_for_a_proxy_is_refused(request_line: str) -> None:
    relay = IndexRelay(None, environ={}, resolve=nowhere)
    async with relay.listen(group=None) as path:
        assert (await ask(path, request_line)).startswith("HTTP/1.1 400 ")


async def test_a_server_that_keeps_its_connection_open_does_not_outlive_the_relay() -> None:
    """Since Python 3.12 a server waits for its connections, so a silent index was waited for without
    end."""
    gone = asyncio.Event()

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        gone.set()

    async with await asyncio.start_server(stay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        before = asyncio.all_tasks()
        relay = IndexRelay(f"http://127.0.0.1:{port}/simple", environ={})
        async with asyncio.timeout(60), relay.listen(group=None) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            writer.write_eof()
            assert await reader.read(1) == b"x"
        async with asyncio.timeout(60):
            await gone.wait()
        assert len(asyncio.all_tasks() - before) <= 1, "only the server's own may be ending"
        writer.close()


async def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.sandbox.environments.index_relay.CONNECT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        relay = IndexRelay(None, environ={"HTTPS_PROXY": proxy})
        async with relay.listen(group=None) as path:
            assert "502" in await ask(path, "CONNECT files.example.com:443 HTTP/1.1")
    assert relay.away == "the proxy does not answer about files.example.com:443"


async def test_an_index_that_is_away_is_named() -> None:
    relay = IndexRelay("https://index.example.com/simple", environ={}, resolve=nowhere)
    async with relay.listen(group=None) as path:
        said = await ask(path, "CONNECT index.example.com:443 HTTP/1.1")
    assert said.startswith("HTTP/1.1 502 ")
    assert "index.example.com does not resolve" in str(relay.away)


async def test_the_operators_proxy_is_used_but_not_for_internal_addresses() -> None:
    async with listening() as (port, heads):
        environ = {"HTTPS_PROXY": f"http://127.0.0.1:{port}", "NO_PROXY": "near.example.com"}
        relay = IndexRelay("https://index.example.com/simple", environ=environ, resolve=nowhere)
        async with relay.listen(group=None) as path:
            said = await ask(path, "CONNECT index.example.com:443 HTTP/1.1")
            assert said.startswith("HTTP/1.1 200 Connection established")
            near = await ask(path, "CONNECT near.example.com:443 HTTP/1.1")
            assert near.startswith("HTTP/1.1 502 ")
            refused = await ask(path, "CONNECT 10.0.0.7:443 HTTP/1.1")
            assert refused.startswith("HTTP/1.1 403 ")
    (head,) = heads
    assert head.startswith(b"CONNECT index.example.com:443 HTTP/1.1\r\n")


def test_a_proxy_with_a_login_is_refused_and_the_login_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy.example.com:3128")
    given = make_env_vars("bwrap")
    assert "secret" not in str(given)
    with pytest.raises(Refused, match="HTTPS_PROXY has a login"):
        proxies_of(given)
    with pytest.raises(Refused, match="not the address of an HTTP proxy"):
        proxies_of({"all_proxy": "socks5://proxy.example.com:1080"})
    assert without_login("http://proxy.example.com:3128") == "http://proxy.example.com:3128"


async def test_first_connections_at_once_learn_the_index_together() -> None:
    """uv opens several connections to its index at once, which may be a mirror at a private address."""
    async with listening() as (port, heads):

        async def slow(host: str, port: int) -> Sequence[str]:
            await asyncio.sleep(0.05)
            return ["127.0.0.1"]

        relay = IndexRelay(None, environ={}, resolve=slow)
        async with relay.listen(group=None) as path:
            request = f"GET http://mirror.example.com:{port}/simple/ HTTP/1.1"
            said = await asyncio.gather(*(ask(path, request) for _ in range(8)))
            other = await ask(path, "CONNECT 10.0.0.7:443 HTTP/1.1")
    assert [one[-5:] for one in said] == ["there"] * 8
    assert other.startswith("HTTP/1.1 403 ")
    assert len(heads) == 8
