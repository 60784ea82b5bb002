"""Our own HTTP clients dial checked addresses only, whatever a name answers the next time."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network

import httpx
import pytest

from infra.http import checked_addresses
from infra.http.checked_addresses import CheckedDialling
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.settings.git import AllowedAddresses
from schemas.errors import InvalidConfig, RepositoryAway

NAME = "forge.example.org"
AS_PUBLIC = AllowedAddresses(networks=(ip_network("198.51.100.0/24"),))
"""A network where nobody answers, taken for a public one."""


class Rebinding:
    """A name with a public address when it is first asked for, and a loopback address afterwards."""

    def __init__(self) -> None:
        self.asked = 0

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        self.asked += 1
        return ("198.51.100.7",) if self.asked == 1 else ("127.0.0.1",)


async def always_loopback(host: str, port: int) -> tuple[str, ...]:
    return ("127.0.0.1",)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server of this machine, and what it was sent."""
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nSet-Cookie: a=b\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heard


@asynccontextmanager
async def client(
    allowed: AllowedAddresses, resolve: checked_addresses.Resolve
) -> AsyncIterator[httpx.AsyncClient]:
    transport = CheckedTransport(
        CheckedDialling(allowed, resolve=resolve),
        tls=ssl.create_default_context(),
        limits=httpx.Limits(max_connections=2),
    )
    async with httpx.AsyncClient(transport=transport, cookies=no_cookies()) as opened:
        yield opened


async def test_a_name_that_answers_loopback_is_not_dialled() -> None:
    async with listening() as (port, heard), client(AllowedAddresses(), always_loopback) as http:
        with pytest.raises(
            InvalidConfig, match=r"has the address 127\.0\.0\.1, which is not public"
        ):
            await http.get(f"http://{NAME}:{port}/")
        assert heard == []


async def test_a_name_is_resolved_once_for_each_connection_and_dialled_as_it_was_checked() -> None:
    """The first answer is public, so it passes, and is dialled: nothing answers there. The second answer
    is checked again."""
    names = Rebinding()
    async with listening() as (port, heard), client(AS_PUBLIC, names.resolve) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{NAME}:{port}/", timeout=0.3)
        assert names.asked == 1
        with pytest.raises(InvalidConfig, match="which is not public"):
            await http.get(f"http://{NAME}:{port}/", timeout=0.3)
        assert heard == []


async def test_twin_a_client_that_resolves_after_the_check_reaches_this_machine() -> None:
    names = Rebinding()
    async with listening() as (port, heard), httpx.AsyncClient() as http:
        await CheckedDialling(AS_PUBLIC, resolve=names.resolve).addresses(NAME, port)
        [address] = await names.resolve(NAME, port)
        await http.get(f"http://{address}:{port}/")
        assert len(heard) == 1


async def test_one_bad_address_among_good_ones_is_enough() -> None:
    async def mixed(host: str, port: int) -> tuple[str, ...]:
        return ("8.8.8.8", "10.0.0.1")

    with pytest.raises(InvalidConfig, match=r"10\.0\.0\.1"):
        await CheckedDialling(AllowedAddresses(), resolve=mixed).addresses(NAME, 443)


async def test_a_host_that_the_operator_names_is_dialled_and_keeps_no_cookie() -> None:
    allowed = AllowedAddresses(hosts=frozenset({NAME}))
    async with listening() as (port, heard), client(allowed, always_loopback) as http:
        for _ in range(2):
            assert (await http.get(f"http://{NAME}:{port}/")).status_code == 200
        assert len(heard) == 2
        assert not any(b"cookie" in one.lower() for one in heard)
        assert f"Host: {NAME}:{port}".encode() in heard[0]


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "a..b", "-x", "x.", "größe.org"])
async def test_other_forms_of_an_address_are_not_resolved(host: str) -> None:
    with pytest.raises(InvalidConfig, match="is not the name of a host"):
        await CheckedDialling(AllowedAddresses(), resolve=always_loopback).addresses(host, 443)


async def test_a_name_that_does_not_resolve_is_an_absence() -> None:
    async def fails(host: str, port: int) -> tuple[str, ...]:
        raise OSError(-2, "Name or service not known")

    async def nothing(host: str, port: int) -> tuple[str, ...]:
        return ()

    for resolve in (fails, nothing):
        with pytest.raises(RepositoryAway, match="until it"):
            await CheckedDialling(AllowedAddresses(), resolve=resolve).addresses(NAME, 443)


async def test_the_resolver_finds_the_loopback_addresses_of_localhost() -> None:
    found = await checked_addresses.resolve("localhost", 80)
    assert set(found) <= {"127.0.0.1", "::1"}
