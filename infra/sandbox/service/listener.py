"""The service as a server of its own: it accepts clients that have a certificate.

A stranger can hold a few connections for a few seconds, and nothing else.
"""

import asyncio
import logging
import socket
import ssl
from urllib.parse import urlsplit

from infra.sandbox.service.session import ServiceSession
from infra.sandbox.service.snapshots import SnapshotCache
from infra.sandbox.service.sockets import CarriedSockets
from infra.sandbox.service.tls import HandshakeFailed, abort, admit_client

logger = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""The most connections that have not shown a certificate yet. Further ones are closed."""

MOST_CLIENTS = 256
READ_AHEAD = 1 << 20


class SandboxListener:
    """Accepts clients at `url` (tcp://host:port) until it is closed."""

    def __init__(self, url: str, context: ssl.SSLContext, *, level: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._context = context
        self._level = level
        self._server: asyncio.Server | None = None
        self._snapshots = SnapshotCache()
        self._strangers = 0
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def port(self) -> int:
        assert self._server is not None  # noqa: S101 - it listens
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def listen(self) -> None:
        """Listen. Returns when clients are accepted."""
        self._server = await asyncio.start_server(
            self._accept, self._host, self._port, backlog=MOST_STRANGERS, limit=READ_AHEAD
        )

    async def aclose(self) -> None:
        """Stop listening, and end all user code."""
        if self._server is not None:
            self._server.close()
        for writer in self._clients.values():
            abort(writer)
        await asyncio.gather(*self._clients, return_exceptions=True)  # each ends its user code
        self._snapshots.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if self._strangers >= MOST_STRANGERS or len(self._clients) >= MOST_CLIENTS or task is None:
            abort(writer)
            return
        keep_alive(writer)
        self._strangers += 1
        try:
            await admit_client(writer, self._context)
        except HandshakeFailed:
            abort(writer)
            return
        finally:
            self._strangers -= 1
        self._clients[task] = writer
        try:
            await ServiceSession(
                reader,
                writer,
                level=self._level,
                snapshots=self._snapshots,
                make_sockets=CarriedSockets,
            ).serve()
        except Exception:  # one client must not end the others
            logger.exception("serving a client failed")
        finally:
            del self._clients[task]
            abort(writer)


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice within a minute that the other machine is gone."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50_000)
