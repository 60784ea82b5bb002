"""Request bodies: read after the key is checked, and only a few large ones at a time.

An unread body stays in the client's socket, because the server reads at most 64 KiB ahead. So a request
that waits for its turn, or is refused, costs no memory.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from infra.model_api.wire.errors import GatewayError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

LONGEST_BODY = 8 << 20
SMALL_BODY = 64 << 10
"""A body of at most this size is read without waiting for a turn."""

LARGE_BODIES = 32
"""How many larger bodies are read at the same time, and how many of them of one run."""
LARGE_OF_A_RUN = 4

MOST_BRACES = 1 << 14
"""How many objects and lists a body may have. Each takes some 1,400 bytes of memory, and up to 50 us in
which nobody else is answered."""

TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text in JSON, perhaps without its end. Braces in it are not those of objects. It takes linear
time."""

DISCARDED = 1 << 20
DISCARD_S = 2.0
"""How much of a refused body is read and dropped before the connection is closed."""


class LargeBodyTurns:
    """Limits how many large bodies are read at the same time."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(LARGE_BODIES)
        self._runs: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, run: str) -> AsyncIterator[None]:
        """Wait until a large body of this run may be read, and keep that place inside the block."""
        turns, users = self._runs.get(run, (asyncio.Semaphore(LARGE_OF_A_RUN), 0))
        self._runs[run] = (turns, users + 1)
        try:
            async with turns, self._all:
                yield
        finally:
            turns, users = self._runs.pop(run)
            if users > 1:
                self._runs[run] = (turns, users - 1)


class BytesBudget(Protocol):
    """Counts the bytes of bodies. Both methods raise GatewayError when there are too many."""

    def check_room(self, num_bytes: int) -> None: ...

    def count_received(self, num_bytes: int) -> None: ...


class RequestBody:
    """The body of one request. `complete` is true once nothing more of it will arrive."""

    def __init__(self, scope: Scope, receive: Receive, bodies: LargeBodyTurns) -> None:
        self._receive = receive
        self._bodies = bodies
        self._announced_length = _announced_length(scope)
        self.complete = self._announced_length == 0

    async def read(self, run: str, *, budget: BytesBudget | None = None) -> bytes:
        """Read and return the whole body. Raises GatewayError when it is too large, when the budget does
        not allow its bytes, when it has too many objects and lists, or when the client disconnects."""
        length = self._announced_length
        if length is not None and length > LONGEST_BODY:
            raise _too_large()
        if length is not None and budget is not None:
            budget.check_room(length)
        if length is not None and length <= SMALL_BODY:
            body = await self._read_all(budget)
        else:
            async with self._bodies.turn(run):
                body = await self._read_all(budget)
        check_braces(body)
        return body

    @property
    def announced_length(self) -> int | None:
        """The length in bytes that its header gives; None for a body in chunks."""
        return self._announced_length

    async def discard(self) -> None:
        """Read and drop the rest, for at most DISCARD_S seconds and about DISCARDED bytes."""
        dropped = 0
        with contextlib.suppress(TimeoutError, GatewayError):
            async with asyncio.timeout(DISCARD_S):
                while not self.complete and dropped < DISCARDED:
                    dropped += len(await self._read_piece())

    async def wait_for_disconnect(self) -> None:
        """Return once the client has disconnected, after its body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _read_all(self, budget: BytesBudget | None) -> bytes:
        body = bytearray()
        while not self.complete:
            piece = await self._read_piece()
            if budget is not None:
                budget.count_received(len(piece))
            body += piece
            if len(body) > LONGEST_BODY:
                raise _too_large()
        return bytes(body)

    async def _read_piece(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            self.complete = True
            raise GatewayError(400, "disconnected", "the client disconnected")
        self.complete = not message.get("more_body")
        piece: bytes = message.get("body", b"")
        return piece


def _announced_length(scope: Scope) -> int | None:
    """The length in bytes that the header gives; None for a body in chunks. The HTTP parser has already
    refused lengths that are not numbers."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    return int(headers.get(b"content-length", b"0"))


def check_braces(body: bytes | bytearray) -> None:
    """Raise GatewayError (413) when a body has more objects and lists than are worth parsing."""
    num_braces = _braces_in(body)
    if num_braces > MOST_BRACES:
        num_braces = _braces_in(TEXT.sub(b"", body))
    if num_braces > MOST_BRACES:
        text = f"the body has {num_braces} of {{ and [; at most {MOST_BRACES} are parsed; send less"
        raise GatewayError(413, "too_large", text)


def _braces_in(data: bytes | bytearray) -> int:
    return data.count(b"{") + data.count(b"[")


def _too_large() -> GatewayError:
    return GatewayError(
        413,
        "too_large",
        f"the request body is larger than {LONGEST_BODY} bytes; send a shorter conversation",
    )


def key_of(scope: Scope) -> str:
    """The API key, in the header of OpenAI's or of Anthropic's clients."""
    found = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).decode("latin-1").removeprefix("Bearer ").strip()
        if name == b"x-api-key":
            found = bytes(value).decode("latin-1").strip()
    return found
