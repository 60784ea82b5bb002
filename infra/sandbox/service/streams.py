"""Streams of bytes inside a connection. Each has a window, so a slow reader holds back its own stream
and no other."""

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable

from infra.sandbox.host_messages import ProtocolError
from infra.sandbox.service.frames import CHUNK, FrameKind

WINDOW = 512 << 10
"""How many bytes of a stream may be on their way or unread, in each direction."""

CREDIT = struct.Struct(">I")
Send = Callable[[FrameKind, int, bytes], None]


class StreamReset(ConnectionError):
    """The stream or its connection is over."""


class Stream:
    """A stream of bytes in both directions."""

    def __init__(self, number: int, send: Send, forget: Callable[[int], None]) -> None:
        self.number = number
        self._send_frame = send
        self._forget = forget
        self._received: deque[bytes] = deque()
        self._room = WINDOW
        self._credit = WINDOW
        self._ended_here = self._ended_there = self._over = False
        self._changed = asyncio.Event()

    async def send(self, data: bytes) -> None:
        """Send bytes, as fast as the other end takes them. Raises StreamReset."""
        view = memoryview(data)
        while view:
            while not self._credit:
                await self._wait()
            self._check()
            size = min(len(view), CHUNK, self._credit)
            self._credit -= size
            self._send_frame(FrameKind.DATA, self.number, bytes(view[:size]))
            view = view[size:]
            await asyncio.sleep(0)  # others may send between two chunks

    async def receive(self) -> bytes:
        """Return the next bytes, and none at the end. Raises StreamReset."""
        while not self._received:
            self._check()
            if self._ended_there:
                return b""
            await self._wait()
        data = b"".join(self._received)
        self._received.clear()
        self._room += len(data)
        if not self._over:
            self._send_frame(FrameKind.CREDIT, self.number, CREDIT.pack(len(data)))
        return data

    def end(self) -> None:
        """Send no more bytes. The other end may still send some."""
        if not self._ended_here and not self._over:
            self._ended_here = True
            self._send_frame(FrameKind.END, self.number, b"")
            self._forget_if_done()

    def reset(self) -> None:
        """End the stream in both directions, if it is not over."""
        if not self._over:
            self._send_frame(FrameKind.RESET, self.number, b"")
            self.lose()

    def lose(self) -> None:
        """Note that the stream is over. Whoever waits for it gets StreamReset."""
        self._over = True
        self._received.clear()
        self._changed.set()
        self._forget(self.number)

    def take(self, kind: FrameKind, payload: bytes) -> None:
        """Handle a frame of the stream. Raises ProtocolError when the other end exceeds its window."""
        match kind:
            case FrameKind.DATA:
                self._room -= len(payload)
                if self._room < 0 or self._ended_there or not payload:
                    raise ProtocolError("it sent bytes of a stream that it may not send")
                self._received.append(payload)
            case FrameKind.CREDIT:
                if len(payload) != CREDIT.size:
                    raise ProtocolError("it sent a credit without a number")
                self._credit += CREDIT.unpack(payload)[0]
                if self._credit > WINDOW:
                    raise ProtocolError("it gave more credit than the window of a stream")
            case FrameKind.END:
                self._ended_there = True
                self._forget_if_done()
            case _:
                self.lose()
        self._changed.set()

    def _forget_if_done(self) -> None:
        if self._ended_here and self._ended_there:
            self._forget(self.number)

    def _check(self) -> None:
        if self._over:
            raise StreamReset("the stream is over")

    async def _wait(self) -> None:
        self._check()
        self._changed.clear()
        await self._changed.wait()


async def join(stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes between a stream and a socket in both directions, until both have ended or one is
    lost. Then the socket is closed."""

    async def outward() -> None:
        while data := await reader.read(CHUNK):
            await stream.send(data)
        stream.end()

    async def inward() -> None:
        while data := await stream.receive():
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    tasks = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
    try:
        await asyncio.gather(*tasks)
    except OSError:  # StreamReset too
        stream.reset()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if any(task.cancelled() for task in tasks):
            stream.reset()
        writer.close()
