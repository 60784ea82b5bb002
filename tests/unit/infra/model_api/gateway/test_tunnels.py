"""The proxy on a sandbox's socket: real TLS clients to a real server, and everything that is refused."""

import asyncio
import contextlib
import ssl
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from infra.model_api.gateway import tunnels
from infra.model_api.gateway.server import HttpGateway
from infra.settings.git import AllowedAddresses
from infra.settings.network_policy import NetworkPolicy
from tests.kit.http_victim import Quick
from tests.kit.secure_server import Secure, serving
from tests.kit.sockets import relayed

NAME = "inside.example.com"


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Secure]:
    async with serving(tmp_path) as made:
        yield made


async def resolve(host: str, port: int) -> Sequence[str]:
    """The name of this machine, and one of a public address besides."""
    found = {NAME: ("127.0.0.1",), "both.example.com": ("93.184.215.14", "10.0.0.7")}
    if host not in found:
        raise OSError("no such name")
    return found[host]


@asynccontextmanager
async def proxy(*network: str, policy: str | None = None) -> AsyncIterator[str]:
    """The relay of a sandbox whose run has these addresses. The policy allows just them."""
    allowed = NetworkPolicy.parse(f"*={','.join(network)}" if policy is None else policy)
    gateway = HttpGateway(Quick(), network=allowed, resolve=resolve)
    await gateway.start()
    async with relayed(await gateway.open_socket("r1", network=network)) as url:
        yield url
    await gateway.aclose()


async def refusal(url: str, target: str) -> str:
    """The status line and text with which a tunnel is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n".encode())
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return said.decode()


def fetch(url: str, address: str, context: ssl.SSLContext) -> bytes:
    handlers = (
        urllib.request.ProxyHandler({"https": url}),
        urllib.request.HTTPSHandler(context=context),
    )
    with urllib.request.build_opener(*handlers).open(f"https://{address}/", timeout=10) as answer:
        found: bytes = answer.read()
        return found


async def test_real_tls_clients_reach_an_allowed_address(secure: Secure) -> None:
    async with proxy(secure.address) as url:
        assert await asyncio.to_thread(fetch, url, secure.address, secure.trusting) == b"hello"
        async with httpx.AsyncClient(proxy=url, verify=secure.trusting) as http:
            answers = await asyncio.gather(
                *(http.get(f"https://{secure.address}/") for _ in range(8))
            )
    assert {answer.text for answer in answers} == {"hello"}
    assert secure.num == 9


async def test_other_addresses_are_refused_by_the_tunnel(secure: Secure) -> None:
    port = secure.address.rpartition(":")[2]
    other = f"127.0.0.1:{int(port) ^ 1}"
    async with proxy(secure.address, "both.example.com:443") as url:
        for target in (other, f"127.0.0.2:{port}", f"localhost:{port}", "169.254.169.254:80"):
            assert f"may not connect to {target}" in await refusal(url, target)
        for target in ("", "nowhere", f"http://127.0.0.1:{port}", f"127.0.0.1:{port}@x:1", "::1:1"):
            assert (await refusal(url, target)).startswith("HTTP/1.1 400 ")
        assert "has the address 10.0.0.7" in await refusal(url, "both.example.com:443")
    assert secure.num == 0


async def test_a_name_does_not_stand_for_this_machine(secure: Secure) -> None:
    port = secure.address.rpartition(":")[2]
    async with proxy(f"{NAME}:{port}") as url:
        said = await refusal(url, f"{NAME}:{port}")
    assert said.startswith("HTTP/1.1 403 ")
    assert "has the address 127.0.0.1, which is not public" in said
    async with proxy(f"{NAME}:{port}", f"127.0.0.1:{int(port) ^ 1}") as url:
        assert "is not public" in await refusal(url, f"{NAME}:{port}"), "another port is named"


async def test_twin_without_the_check_it_does(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllowedAddresses, "permits", lambda self, address: True)
    port = secure.address.rpartition(":")[2]
    async with proxy(f"{NAME}:{port}") as url:
        assert await served(url, f"{NAME}:{port}")


async def served(url: str, target: str) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    return line.startswith(b"HTTP/1.1 200 ")


async def test_a_name_may_have_an_address_that_is_named_too(secure: Secure) -> None:
    port = secure.address.rpartition(":")[2]
    async with proxy(f"{NAME}:{port}", secure.address) as url:
        assert await served(url, f"{NAME}:{port}")


async def test_an_operator_who_takes_an_address_back_closes_it(secure: Secure) -> None:
    async with proxy(secure.address, policy="*=files.example.com:443") as url:
        assert "403" in await refusal(url, secure.address)
    async with proxy("169.254.169.254:80", policy="") as url:
        assert "403" in await refusal(url, "169.254.169.254:80")


async def test_tunnels_are_bounded(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "MOST_TUNNELS", 1)
    monkeypatch.setattr(tunnels, "MOST_BYTES", 1000)
    async with proxy(secure.address) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"CONNECT {secure.address} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        assert "503" in await refusal(url, secure.address)
        writer.write(b"x" * 2000)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        again = await asyncio.open_connection("127.0.0.1", port)
        again[1].write(f"CONNECT {secure.address} HTTP/1.1\r\n\r\n".encode())
        assert b"200" in await again[0].readline(), "the first is not counted any more"
        again[1].close()


def test_a_rate_has_bursts() -> None:
    now = 1000.0
    of_a_socket = tunnels.Tunnels((), clock=lambda: now)
    assert of_a_socket.spend(tunnels.BURST_BYTES)
    assert of_a_socket.rest_s() == 0
    assert of_a_socket.spend(tunnels.BYTES_PER_S)
    assert of_a_socket.rest_s() == pytest.approx(1)
    now += 1
    assert of_a_socket.rest_s() == 0
    now += 3600
    assert of_a_socket.spend(2 * tunnels.BURST_BYTES)
    assert of_a_socket.rest_s() > 0


@pytest.mark.parametrize("is_upload", [True, False])
async def test_tunnels_have_a_rate(is_upload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, this takes a few milliseconds."""
    size, seconds = 4 << 20, 1.0
    monkeypatch.setattr(tunnels, "BURST_BYTES", 0)
    monkeypatch.setattr(tunnels, "BYTES_PER_S", int(size / seconds / 2))
    received = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_upload:
            received.set_result(len(await reader.readexactly(size)))
        else:
            writer.write(b"x" * size)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with proxy(address) as url:
        began = asyncio.get_running_loop().time()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"CONNECT {address} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        if is_upload:
            writer.write(b"x" * size)
            assert await asyncio.wait_for(received, 60) == size
        else:
            assert len(await asyncio.wait_for(reader.readexactly(size), 60)) == size
        assert asyncio.get_running_loop().time() - began > seconds
        writer.close()
    server.close()


async def test_a_head_in_pieces_and_one_without_end(secure: Secure) -> None:
    async with proxy(secure.address) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in ("CON", "NECT ", secure.address, " HTTP/1.1\r\n", "\r\n"):
            writer.write(piece.encode())
            await writer.drain()
            await asyncio.sleep(0.01)
        assert b"200" in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT " + b"x" * 20_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        writer.close()
