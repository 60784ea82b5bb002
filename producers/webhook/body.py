"""Reads the body of a request from a sender that nobody knows yet, in bounded memory and time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive

from producers.webhook.headers import RequestHeaders

MOST_BYTES = 25 << 20
"""The largest payload that GitHub sends."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of bodies. A body beyond `free` bytes needs one of `permits`, so that all bodies
    together have a bounded size. A body must be complete within `within_s` seconds."""

    most: int = MOST_BYTES
    free: int = 64 << 10
    permits: int = 8
    within_s: float = 30.0


class BodyRefused(Exception):
    """The body cannot be taken. `status` is that of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SenderGone(Exception):
    """The sender closed the connection before its body was complete."""


class BodyReader:
    """Reads bodies within limits that all of them share."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self._limits = limits or BodyLimits()
        self._permits = asyncio.Semaphore(self._limits.permits)

    @asynccontextmanager
    async def read(self, headers: RequestHeaders, receive: Receive) -> AsyncIterator[bytearray]:
        """The body, for as long as the block lasts. Reads at most one piece more than a body may have.
        Raises BodyRefused, SenderGone."""
        declared = headers.one(b"content-length") or b""
        if declared.isdigit() and int(declared[:20]) > self._limits.most:
            raise self._too_large()
        seconds = f"{self._limits.within_s:g} s"
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._limits.within_s):
                    body = await self._read(receive, held)
            except TimeoutError as error:
                raise BodyRefused(408, f"the body was not read within {seconds}") from error
            yield body

    async def _read(self, receive: Receive, held: AsyncExitStack) -> bytearray:
        """The whole body. A large one enters a permit into `held`."""
        body = bytearray()
        is_large, is_more = False, True
        while is_more:
            message = await receive()
            if message["type"] != "http.request":
                raise SenderGone
            piece = message.get("body", b"")
            if len(body) + len(piece) > self._limits.most:
                raise self._too_large()
            if not is_large and len(body) + len(piece) > self._limits.free:
                await held.enter_async_context(self._permits)
                is_large = True
            body += piece
            is_more = message.get("more_body", False)
        return body

    def _too_large(self) -> BodyRefused:
        return BodyRefused(413, f"the body has more than {self._limits.most} bytes; send less")
