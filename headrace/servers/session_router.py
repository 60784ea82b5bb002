"""A local endpoint whose requests name their sample in a header, and go to that sample's endpoint.

A library that shares one client among all of its rollouts can be given only one URL and one key.
"""

import asyncio
import contextlib
from urllib.parse import urlsplit

from headrace.servers.loopback import read_head

MOST_HEAD = 64 << 10
PREFIX = "/v1"
DROPPED = frozenset({"authorization", "x-api-key", "host", "connection"})


class SessionRouter:
    """Routes requests by their header `header`."""

    def __init__(self, header: str) -> None:
        self._header = header.lower()
        self._routes: dict[str, tuple[str, str]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen, and return the base URL for clients."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MOST_HEAD)
        port: int = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}{PREFIX}"

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    def route(self, session: str, *, url: str, key: str) -> None:
        """Send the requests of a session to `url` with this key."""
        self._routes[session] = (url, key)

    def forget(self, session: str) -> None:
        """Route a session no more."""
        self._routes.pop(session, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one request on, and its answer back. The connection ends with the answer."""
        with (
            contextlib.closing(writer),
            contextlib.suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError),
        ):
            first, headers = await read_head(reader)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            route = self._routes.get(headers.get(self._header, ""))
            if route is None:
                writer.write(b"HTTP/1.1 404 Unknown\r\ncontent-length: 0\r\n\r\n")
            else:
                await self._forward(first, headers, body, writer, route)
            await writer.drain()

    async def _forward(
        self,
        first: str,
        headers: dict[str, str],
        body: bytes,
        writer: asyncio.StreamWriter,
        route: tuple[str, str],
    ) -> None:
        url, key = route
        parts = urlsplit(url)
        method, path, version = first.split(" ")
        lines = {name: value for name, value in headers.items() if name not in DROPPED}
        lines |= {"host": parts.netloc, "authorization": f"Bearer {key}", "connection": "close"}
        text = f"{method} {parts.path}{path.removeprefix(PREFIX)} {version}\r\n"
        text += "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
        answers, upstream = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            upstream.write(text.encode("latin-1") + body)
            await upstream.drain()
            while chunk := await answers.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        finally:
            upstream.close()
