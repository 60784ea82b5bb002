"""Dials only addresses that are allowed, checked at the moment of dialling.

A name is resolved once, every address that it has is checked, and the connection goes to an address that
was checked. A name that answers with a public address first and a loopback address later (DNS rebinding)
therefore reaches nothing.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpcore
import httpx

from infra.settings.git import HOST, AllowedAddresses
from schemas.errors import InvalidConfig, RepositoryAway
from schemas.text import plain

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host name. Raises OSError when it has none."""

RESOLVE_S = 15.0
MOST_ADDRESSES = 8
"""The maximum number of addresses of a host that are tried."""

READ_BYTES = 16 << 10
"""The most bytes of an answer that are parsed at once."""

_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="resolve")
"""Threads for names alone: a slow name server holds up no other work of this process."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the resolver of this machine. Raises OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_S):
        return await loop.run_in_executor(_RESOLVERS, _look_up, host, port)


def _look_up(host: str, port: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


GIT_ADVICE = "use another repository, or let the operator allow it with HEADRACE_GIT_ALLOW"


class CheckedDialling:
    """Finds the addresses at which a host may be dialled. `advice` is what to do about an address that
    may not be dialled."""

    def __init__(
        self, allowed: AllowedAddresses, *, resolve: Resolve = resolve, advice: str = GIT_ADVICE
    ) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._advice = advice

    def is_named(self, host: str) -> bool:
        """Whether the operator allows this host by its name, whatever addresses it has."""
        return host in self._allowed.hosts

    async def addresses(self, host: str, port: int) -> tuple[str, ...]:
        """Return the addresses of a host, all of which may be dialled. Raises InvalidConfig when the
        name is not that of a host or one of its addresses is not allowed, and RepositoryAway when it
        does not resolve."""
        found = (host,) if _is_address(host) else await self._look_up(host, port)
        if not self.is_named(host):
            for address in found:
                if not self._allowed.permits(address):
                    raise InvalidConfig(
                        f"{host} has the address {address}, which is not public; {self._advice}"
                    )
        return found[:MOST_ADDRESSES]

    async def _look_up(self, host: str, port: int) -> tuple[str, ...]:
        if not HOST.fullmatch(host):
            raise InvalidConfig(
                f"{plain(host)[:120]!r} is not the name of a host; write it in lower case, without a "
                "dot at its end"
            )
        try:
            found = tuple(await self._resolve(host, port))
        except (OSError, UnicodeError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise RepositoryAway(
                f"the name {host} does not resolve now ({why}); retrying until it does"
            ) from error
        if not found:
            raise RepositoryAway(f"the name {host} has no address; retrying until it has one")
        return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
