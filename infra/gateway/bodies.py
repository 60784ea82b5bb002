"""Bodies of requests: read after the key was checked, and only so many large ones at a time.

What is not read stays in the client's socket: the server reads at most 64 KiB ahead, so a request that
waits for its turn, or that is refused, costs no memory.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from infra.gateway.sessions import GatewayError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LONGEST_BODY = 8 << 20
SMALL_BODY = 64 << 10
"""A body up to here is read at once."""

LARGE_BODIES = 32
"""Larger ones that are read at the same time, and how many of them with one key."""
LARGE_OF_A_KEY = 4

DISCARDED = 1 << 20
DISCARD_S = 2.0
"""So much of a refused body is read and dropped before the connection is closed."""


class Bodies:
    """Turns of those that read a large body."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(LARGE_BODIES)
        self._keys: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait until a large body may be read with this key."""
        turns, users = self._keys.get(key, (asyncio.Semaphore(LARGE_OF_A_KEY), 0))
        self._keys[key] = (turns, users + 1)
        try:
            async with turns, self._all:
                yield
        finally:
            turns, users = self._keys.pop(key)
            if users > 1:
                self._keys[key] = (turns, users - 1)


class Body:
    """The body of one request. `complete`: all of it was received."""

    def __init__(self, scope: Scope, receive: Receive, bodies: Bodies) -> None:
        self._receive = receive
        self._bodies = bodies
        self._announced = _announced(scope)
        self.complete = self._announced == 0

    async def read(self, key: str) -> bytes:
        """All of it. Raises GatewayError when it is too large, or the client went away."""
        if self._announced is not None and self._announced > LONGEST_BODY:
            raise _too_large()
        if self._announced is not None and self._announced <= SMALL_BODY:
            return await self._whole()
        async with self._bodies.turn(key):
            return await self._whole()

    async def discard(self) -> None:
        """Read on for a moment and drop what comes."""
        dropped = 0
        with contextlib.suppress(TimeoutError, GatewayError):
            async with asyncio.timeout(DISCARD_S):
                while not self.complete and dropped < DISCARDED:
                    dropped += len(await self._piece())

    async def _whole(self) -> bytes:
        body = bytearray()
        while not self.complete:
            body += await self._piece()
            if len(body) > LONGEST_BODY:
                raise _too_large()
        return bytes(body)

    async def _piece(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            self.complete = True
            raise GatewayError(400, "disconnected", "the client went away")
        self.complete = not message.get("more_body")
        piece: bytes = message.get("body", b"")
        return piece


def _announced(scope: Scope) -> int | None:
    """The length that the head gives; None where the body comes in chunks. The parser has refused what
    is not a number."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    return int(headers.get(b"content-length", b"0"))


def _too_large() -> GatewayError:
    return GatewayError(413, "too_large", f"a request may have {LONGEST_BODY} bytes")
