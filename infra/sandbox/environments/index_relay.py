"""The way of uv to the package index: an HTTP proxy on a unix socket, which checks each address.

uv has no network of its own. The index may list files at any place, and may redirect. So the proxy
connects to the hosts of the index, and else to public addresses only, each of which is checked when it
is dialled. An index that names the internal network reaches nothing there.

If the operator names no index, it is the one of uv, whose host is the first that uv asks for. It may be
a mirror at a private address, and other hosts at the same address are its own.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.http.socket_directory import SocketDirectory
from infra.settings.git import AllowedAddresses, Network
from infra.settings.packages import INDEX
from infra.task_cancellation import TaskGroup
from schemas.errors import InvalidConfig, Refused, RepositoryAway

LARGEST_HEAD = 32 << 10
CHUNK = 256 << 10
HEAD_S, CONNECT_S = 30.0, 15.0
ADVICE = f"let the operator name an index with public addresses in {INDEX}"
PORTS = {"http": 80, "https": 443}


class IndexRelay:
    """The proxy for an index. `refused` is the first address that it did not connect to, and `away` the
    first that did not answer, each as a sentence."""

    def __init__(
        self,
        index: str | None,
        *,
        environ: Mapping[str, str],
        hosts: frozenset[str] = frozenset(),
        resolve: Resolve = resolve,
        is_strict: bool = False,
    ) -> None:
        """`hosts` hold files of the index. A strict one connects to the index and to these hosts only,
        so to nothing without an index. Raises Refused when the operator's own proxy cannot be used."""
        own = urlsplit(index).hostname if index else None
        named = hosts | frozenset({own.lower()} if own else ())
        self._only = named if is_strict else None
        self._resolve = resolve
        self._dialling = self._dialling_of(AllowedAddresses(hosts=named))
        self._is_known = is_strict or own is not None
        self._learning = asyncio.Lock()
        self._proxies = proxies_of(environ)
        self.refused: str | None = None
        self.away: str | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def probe(self, index: str) -> str | None:
        """Connect to the index once. Returns why that is impossible, or None."""
        parts = urlsplit(index)
        method = "CONNECT" if parts.scheme == "https" else "GET"
        port = parts.port or PORTS[parts.scheme]
        try:
            _, writer, _ = await self._connect(method, str(parts.hostname), port)
        except (InvalidConfig, RepositoryAway) as error:
            return str(error)
        writer.close()
        return None

    @asynccontextmanager
    async def listen(self, *, group: int | None) -> AsyncIterator[Path]:
        """Serve the proxy on a unix socket that this user and `group` can reach, until the block ends.
        Connections that are open then are closed, also those to a server that answers nothing."""
        directory = SocketDirectory(group=group)
        try:
            path = directory.new_path()
            server = await asyncio.start_unix_server(self.accept, path=path, limit=LARGEST_HEAD)
            path.chmod(0o666)  # the directory decides who can reach it
            try:
                yield path
            finally:
                server.close()
                for task in self._serving:
                    task.cancel()
                await asyncio.gather(*self._serving, return_exceptions=True)
        finally:
            directory.close()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of a client."""
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                async with asyncio.timeout(HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head.decode("latin-1").split("\r\n", 1)[0].split(" ")
                host, port = _place(method, target)
            except (ValueError, TimeoutError, asyncio.LimitOverrunError):
                await _say(writer, "400 Bad Request")
                return
            try:
                far_reader, far_writer, is_proxied = await self._connect(method, host, port)
            except InvalidConfig as error:
                self.refused = self.refused or error.message
                await _say(writer, "403 Forbidden")
                return
            except RepositoryAway as error:
                self.away = self.away or str(error)
                await _say(writer, "502 Bad Gateway")
                return
            with contextlib.closing(far_writer):
                if method == "CONNECT":
                    await _say(writer, "200 Connection established")
                else:
                    far_writer.write(head if is_proxied else _own_form(head, target))
                await _pipe_both((reader, far_writer), (far_reader, writer))

    async def _connect(
        self, method: str, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bool]:
        """Connect to a host, by the operator's proxy if there is one for it, which the last value says.
        Raises InvalidConfig for an address that may not be dialled, and RepositoryAway."""
        if self._only is not None and host not in self._only:
            raise InvalidConfig(f"{host} is not a host of the index of packages; {ADVICE}")
        async with self._learning:  # uv opens several connections at once
            if not self._is_known:
                await self._learn(host, port)
        proxy = self._proxies.get("https" if method == "CONNECT" else "http")
        if proxy is None or _is_bypassed(host, self._proxies.get("no", "")):
            addresses = await self._dialling.addresses(host, port)
            return (*await _dial(addresses, host, port), False)
        with contextlib.suppress(RepositoryAway):  # only the proxy may know the name
            await self._dialling.addresses(host, port)
        parts = urlsplit(proxy)
        near = str(parts.hostname)
        reader, writer = await _dial((near,), near, parts.port or 80)
        if method == "CONNECT":
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
            try:
                async with asyncio.timeout(CONNECT_S):
                    answer = await reader.readuntil(b"\r\n\r\n")
            except (TimeoutError, EOFError, OSError, asyncio.LimitOverrunError) as error:
                writer.close()
                raise RepositoryAway(f"the proxy does not answer about {place}") from error
            if b" 200 " not in answer.split(b"\r\n", 1)[0] + b" ":
                writer.close()
                shown = answer[:80].decode("latin-1").split("\r\n")[0]
                raise RepositoryAway(f"the proxy does not connect to {place}: {shown}")
        return reader, writer, True

    def _dialling_of(self, allowed: AllowedAddresses) -> CheckedDialling:
        return CheckedDialling(allowed, resolve=self._resolve, advice=ADVICE)

    async def _learn(self, host: str, port: int) -> None:
        """Take the first host that uv asks for as that of its index."""
        hosts = frozenset({host})
        own = self._dialling_of(AllowedAddresses(hosts=hosts))
        networks: tuple[Network, ...] = ()
        with contextlib.suppress(
            InvalidConfig, RepositoryAway
        ):  # it is reported when it is dialled
            networks = tuple(ip_network(one) for one in await own.addresses(host, port))
        self._dialling = self._dialling_of(AllowedAddresses(hosts=hosts, networks=networks))
        self._is_known = True


def proxies_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the operator's proxies by scheme, with the names (`no`) for which there is none. Raises
    Refused for one with a login, because packages are fetched by a process that holds no secrets."""
    found: dict[str, str] = {}
    for scheme in ("http", "https", "no", "all"):
        name = f"{scheme}_proxy"
        value = environ.get(name) or environ.get(name.upper())
        if not value:
            continue
        parts = urlsplit(value)
        if scheme != "no" and (parts.username or parts.password):
            raise Refused(
                f"{name.upper()} has a login, and packages are fetched by a process that holds no "
                "secrets; name a proxy that asks for none"
            )
        if scheme != "no" and (parts.scheme != "http" or not parts.hostname):
            raise Refused(
                f"{name.upper()} is not the address of an HTTP proxy; write it like http://proxy:3128"
            )
        found[scheme] = value
    if every := found.pop("all", None):
        found = {"http": every, "https": every, **found}
    return found


def without_login(proxy: str) -> str:
    """Return the address of a proxy without the login in it. That it had one stays visible."""
    before, at, place = proxy.rpartition("@")
    return f"{before.partition('://')[0]}://removed@{place}" if at else proxy


def _is_bypassed(host: str, names: str) -> bool:
    """Whether NO_PROXY names a host, itself or by a domain above it."""
    for name in names.lower().split(","):
        name = name.strip().lstrip(".")
        if name and (name == "*" or host == name or host.endswith(f".{name}")):
            return True
    return False


def _place(method: str, target: str) -> tuple[str, int]:
    """The host and port of a request. Raises ValueError."""
    parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
    port = parts.port or PORTS.get(parts.scheme)
    if not parts.hostname or port is None or (method != "CONNECT" and parts.scheme != "http"):
        raise ValueError(target)
    return parts.hostname, port


def _own_form(head: bytes, target: str) -> bytes:
    """The head of a request as its server gets it: with a path, and for one request only."""
    parts = urlsplit(target)
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, version = first.split(" ")
    kept = [line for line in lines if not line.lower().startswith(("proxy-", "connection:"))]
    text = "\r\n".join([f"{method} {path} {version}", "Connection: close", *kept])
    return text.encode("latin-1")


async def _dial(
    addresses: tuple[str, ...], host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    why: object = "it has no address"
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(address, port, limit=CHUNK)
        except TimeoutError:
            why = "no answer in time"
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
    raise RepositoryAway(f"{host}:{port} cannot be reached: {why}")


async def _say(writer: asyncio.StreamWriter, status: str) -> None:
    close = "" if status.startswith("200") else "Content-Length: 0\r\nConnection: close\r\n"
    writer.write(f"HTTP/1.1 {status}\r\n{close}\r\n".encode())
    await writer.drain()


async def _pipe_both(
    *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass bytes on in both directions, until both have ended or one fails."""
    async with TaskGroup() as group:
        for reader, writer in ways:
            group.create_task(_pipe(reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        return
    writer.transport.abort()
