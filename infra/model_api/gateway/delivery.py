"""Delivers the answer of a request: at once, or as server-sent events while it is sampled.

A stream starts with its first piece of text, or after KEEP_ALIVE_S seconds, so that a request that is
refused soon has the status of its error. When the client disconnects, sampling ends, and the answer that
nobody got is not recorded.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from infra.model_api.gateway.bodies import RequestBody
from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.request import AnswerStream
from schemas.sampling import Turn

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Gone = Callable[[], Awaitable[None]]
"""Returns once the client has disconnected."""

KEEP_ALIVE_S = 10.0
"""After how many seconds without a piece of text a stream says that it is alive."""

RETRY_AFTER = (b"retry-after", b"1")
RETRIED = frozenset({429, 503})
"""The statuses with which the same request may succeed soon."""

JSON, EVENTS = b"application/json", b"text/event-stream"


class Pieces:
    """The text that was sampled and is not sent yet. Pieces that wait for a slow client are joined, so
    they take no more memory than the answer, which is kept anyway."""

    def __init__(self) -> None:
        self._waiting: dict[int, str] = {}
        self.arrived = asyncio.Event()

    def add(self, choice: int, piece: str) -> None:
        self._waiting[choice] = self._waiting.get(choice, "") + piece
        self.arrived.set()

    def take(self) -> dict[int, str]:
        """Return and forget the text that has arrived, by choice."""
        waiting, self._waiting = self._waiting, {}
        self.arrived.clear()
        return waiting


async def sample_while_connected(work: Awaitable[Sequence[Turn]], gone: Gone) -> Sequence[Turn]:
    """Await the turns of a request. Raises GatewayError when the client disconnects before."""
    sampling, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((sampling, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            raise _disconnect_error()
        return sampling.result()
    finally:
        await _cancel(sampling, leaving)


class EventStream:
    """One answer as server-sent events."""

    def __init__(self, send: Send, stream: AnswerStream) -> None:
        self._send = send
        self._stream = stream
        self._is_begun = False

    async def deliver(self, work: Awaitable[Sequence[Turn]], pieces: Pieces, gone: Gone) -> None:
        """Send pieces while the turns are sampled, and then the rest. Raises the error of the request
        while nothing is sent, and sends it as an event afterwards."""
        try:
            turns = await self._sample(asyncio.ensure_future(work), pieces, gone)
        except GatewayError as error:
            if not self._is_begun:
                raise
            await self._write([self._stream.failure(error)])
        else:
            await self._write(self._stream.end(turns))
        await self._send({"type": "http.response.body", "body": b""})

    async def _sample(
        self, sampling: "asyncio.Future[Sequence[Turn]]", pieces: Pieces, gone: Gone
    ) -> Sequence[Turn]:
        leaving = asyncio.ensure_future(gone())
        arriving = asyncio.ensure_future(pieces.arrived.wait())
        try:
            while not sampling.done():
                await asyncio.wait(
                    (sampling, leaving, arriving),
                    timeout=KEEP_ALIVE_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if leaving.done() and not sampling.done():
                    raise _disconnect_error()
                if arriving.done():
                    for choice, piece in pieces.take().items():
                        await self._write(self._stream.text(choice, piece))
                    arriving = asyncio.ensure_future(pieces.arrived.wait())
                elif not sampling.done():
                    await self._write([self._stream.keep_alive])
            return sampling.result()
        finally:
            await _cancel(sampling, leaving, arriving)

    async def _write(self, events: "Sequence[bytes] | Any") -> None:
        if not self._is_begun:
            self._is_begun = True
            headers = [(b"content-type", EVENTS), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})


async def refuse(
    send: Send, body: RequestBody, error: GatewayError, *, failure: Callable[[GatewayError], bytes]
) -> None:
    """Answer with the error. If the body was not read, keep reading it for a moment and drop it: a
    client whose connection closes while it sends may lose the answer."""
    data = failure(error)
    headers = [*json_headers(data), *([RETRY_AFTER] if error.status in RETRIED else [])]
    if body.complete and not error.is_final:
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": data})
        return
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": True})
    if not error.is_final:
        await body.discard()
    await send({"type": "http.response.body", "body": b""})


async def reply(send: Send, status: int, body: bytes) -> None:
    """Send a whole answer in JSON."""
    await send({"type": "http.response.start", "status": status, "headers": json_headers(body)})
    await send({"type": "http.response.body", "body": body})


def json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer in JSON."""
    return [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]


def _disconnect_error() -> GatewayError:
    return GatewayError(400, "disconnected", "the client disconnected")


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """End what is still under way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
