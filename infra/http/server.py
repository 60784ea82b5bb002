"""uvicorn's HTTP server behind a listener of our own, for the gateway and for the API.

At the limit of open files, asyncio's listener logs one line per entry of its backlog and then tries
again. This listener has a small backlog and accepts one connection at a time. At the limit it closes
connections that only wait, and pauses if there are none.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from infra.http.limits import ConnectionLimits, LimitedProtocol, OpenConnections
from infra.rate_limited_log import RateLimit
from schemas.errors import InvalidConfig

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

BACKLOG = 128
REST_S = 0.5
NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HttpServer:
    """Serves an ASGI application until `stop` is called. `port` 0 means a free port."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        limits: ConnectionLimits,
        keep_alive_s: float = 5,
        graceful_s: int = 3,
    ) -> None:
        self._host, self._port = host, port
        self._config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            http="httptools",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # seconds, a float to asyncio
            timeout_graceful_shutdown=graceful_s,
        )
        self._server = _Server(self._config)
        self._limits = limits
        self._sockets: list[socket.socket] = []
        logging.getLogger("uvicorn.error").addFilter(_UVICORN)

    @property
    def port(self) -> int:
        """The port that the server listens on. Available after `listen`."""
        return int(self._sockets[0].getsockname()[1])

    async def listen(self) -> None:
        """Bind the sockets and listen. Raises InvalidConfig when the host or port cannot be used."""
        loop = asyncio.get_running_loop()
        missing: OSError | None = None
        try:
            found = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, address in dict.fromkeys(found):
                try:
                    self._sockets.append(_bind(family, address))
                except OSError as error:
                    if error.errno not in NO_SUCH_ADDRESS:
                        raise
                    missing = error  # a name may resolve to IPv6 on a machine without IPv6
            if missing is not None and not self._sockets:
                raise missing
        except OSError as error:
            self._close()
            raise InvalidConfig(
                f"cannot listen on {self._host}:{self._port} ({error.strerror or error}); choose "
                "another host or port with HEADRACE_URL"
            ) from error

    async def serve(self) -> None:
        """Serve on the sockets that `listen` opened, until `stop` is called."""
        if not self._config.loaded:
            self._config.load()
        connections = OpenConnections(self._limits)
        accepting = [
            asyncio.ensure_future(self._accept(listener, connections)) for listener in self._sockets
        ]
        self._server.accepting = accepting
        try:
            await self._server.serve(sockets=[])
        finally:
            for task in accepting:
                task.cancel()
            await asyncio.gather(*accepting, return_exceptions=True)
            self._close()

    def stop(self) -> None:
        """End `serve`: accept no new connections, and give open requests a moment to finish."""
        self._server.should_exit = True

    async def _accept(self, listener: socket.socket, connections: OpenConnections) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await connections.wait_for_room()
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("a connection cannot be accepted: %s", error.strerror or error)
                closed = error.errno in OUT_OF_FILES and connections.make_room()
                await asyncio.sleep(0 if closed else REST_S)
                continue
            accepted.settimeout(0)
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._take(accepted, connections)

    async def _take(self, accepted: socket.socket, connections: OpenConnections) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: LimitedProtocol(self._config, self._server.server_state, connections),
                accepted,
            )
        except OSError as error:
            accepted.close()
            logger.warning("a connection was lost while it was accepted: %s", error)

    def _close(self) -> None:
        for listener in self._sockets:
            listener.close()


class _Server(uvicorn.Server):
    accepting: list["asyncio.Task[None]"]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process has its own, which uvicorn's would replace."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.accepting:
            task.cancel()
        await super().shutdown(sockets)


_UVICORN = RateLimit()
"""Limits how often uvicorn logs invalid requests and exceptions of the application."""


def _bind(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener
