"""Frames: what the sandbox service and its client send each other, and how large each may be.

A frame is a head of nine bytes (length of the payload, kind, number of the request or stream) and a
payload. Neither end trusts the other, because user code runs beside the service. So each end knows which
kinds it may receive, and refuses a frame by its head, before it has read the payload.
"""

import asyncio
import struct
from enum import IntEnum
from typing import Final

from infra.sandbox.host_messages import ProtocolError

HEAD = struct.Struct(">IBI")
FRAME_S = 30.0
"""How long an end may pause within a frame."""

PIECE = 1 << 20
CHUNK = 64 << 10
"""The most bytes of a stream in one frame."""

LARGEST_CALL = 256 << 20
LARGEST_ANSWER = 32 << 20
LARGEST_RESOLVE = 16 << 20
SMALL = 64 << 10


class FrameKind(IntEnum):
    """The kind of a frame. The comment says which end sends it."""

    HELLO = 1  # service: it can confine user code, or why it cannot
    CALL = 2  # client: a call of a workflow or grader
    DISCOVER = 3  # client: examine the entry points of a snapshot
    OPEN_SOCKET = 4  # service: open a socket to the gateway
    CLOSE_SOCKET = 5  # service: close it
    RESULT = 6  # both: the answer to a request
    FAILURE = 7  # both: the error that a request ended with
    CANCEL = 8  # both: a request is not waited for any more
    SNAPSHOT = 9  # service: open a stream on which the client sends a snapshot
    CONNECT = 10  # service: open a stream to a socket of the gateway
    DATA = 11  # both: bytes of a stream
    CREDIT = 12  # both: how many more bytes of a stream may be sent
    END = 13  # both: no more bytes come on a stream
    RESET = 14  # both: a stream is over
    BEAT = 15  # both: the sender is alive
    RESOLVE = 16  # client: choose the versions of the packages of a rollout


_EITHER: Final = {
    FrameKind.FAILURE: SMALL,
    FrameKind.CANCEL: 0,
    FrameKind.DATA: CHUNK,
    FrameKind.CREDIT: 4,
    FrameKind.END: 0,
    FrameKind.RESET: 0,
    FrameKind.BEAT: 0,
}
TO_SERVICE: Final = {
    **_EITHER,
    FrameKind.CALL: LARGEST_CALL,
    FrameKind.DISCOVER: 1 << 20,
    FrameKind.RESOLVE: LARGEST_RESOLVE,
    FrameKind.RESULT: SMALL,
}
"""The kinds that a service receives, with the most bytes of each."""

TO_CLIENT: Final = {
    **_EITHER,
    FrameKind.HELLO: SMALL,
    FrameKind.RESULT: LARGEST_ANSWER,
    FrameKind.OPEN_SOCKET: SMALL,
    FrameKind.CLOSE_SOCKET: SMALL,
    FrameKind.SNAPSHOT: SMALL,
    FrameKind.CONNECT: SMALL,
}
"""The kinds that a client receives, with the most bytes of each."""


class FrameReader:
    """Reads the frames of one end. `num_bytes` is how many bytes have arrived."""

    def __init__(self, reader: asyncio.StreamReader, largest: dict[FrameKind, int]) -> None:
        self._reader = reader
        self._largest = largest
        self.num_bytes = 0

    async def read(self) -> tuple[FrameKind, int, bytes]:
        """The kind, number and payload of the next frame. Raises ProtocolError for a frame that this end
        may not receive, TimeoutError when a frame stops in its middle, and asyncio.IncompleteReadError
        at the end of the connection."""
        size, code, number = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        self.num_bytes += HEAD.size
        try:
            kind = FrameKind(code)
            largest = self._largest[kind]
        except (ValueError, KeyError):
            raise ProtocolError(f"it sent a frame of kind {code}, which it may not send") from None
        if size > largest:
            raise ProtocolError(f"it sent a frame of {size} bytes, more than {largest}")
        return kind, number, await self._read_payload(size) if size else b""

    async def _read_payload(self, size: int) -> bytes:
        if size <= PIECE:
            async with asyncio.timeout(FRAME_S):
                data = await self._reader.readexactly(size)
            self.num_bytes += size
            return data
        pieces = []
        while size:
            async with asyncio.timeout(FRAME_S):
                piece = await self._reader.readexactly(min(size, PIECE))
            self.num_bytes += len(piece)
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)
