"""HTTP clients that dial only addresses that were checked."""

import asyncio
import ssl
from collections.abc import Iterable
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpcore
import httpx

from infra.http.checked_addresses import CheckedDialling

READ_BYTES = 16 << 10
"""The most bytes of an answer that are parsed at once."""


class FairStream(httpcore.AsyncNetworkStream):
    """A connection that leaves the event loop to others before each read, and reads little at once. A
    server that sends headers without an end would otherwise hold it. The connection is closed when a
    deadline passes while TLS begins, where httpcore closes it only when TLS itself fails."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            begun = await self._inner.start_tls(ssl_context, server_hostname, timeout)
            return FairStream(begun)
        except BaseException:
            await self._inner.aclose()
            raise

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        await asyncio.sleep(0)
        return await self._inner.read(min(max_bytes, READ_BYTES), timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Makes httpcore's connections to checked addresses. TLS still verifies the name."""

    def __init__(self, dialling: CheckedDialling) -> None:
        self._dialling = dialling
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failed: Exception | None = None
        for address in await self._dialling.addresses(host, port):
            try:
                opened = await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
                return FairStream(opened)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed or httpcore.ConnectError(f"{host} has no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("a forge is not reached by a unix socket")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def no_cookies() -> CookieJar:
    """Return a jar that takes no cookie, because a server could recognise its other clients by one."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))


class CheckedTransport(httpx.AsyncHTTPTransport):
    """A transport of httpx that dials checked addresses. It uses no proxy."""

    def __init__(
        self, dialling: CheckedDialling, *, tls: ssl.SSLContext, limits: httpx.Limits
    ) -> None:
        super().__init__(verify=tls, trust_env=False, limits=limits)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=CheckedBackend(dialling),
        )
