"""One end of a connection between the sandbox service and a client: requests with answers, and streams.

A frame that this end did not ask for costs a token, and tokens come back with time. So the other end can
send any number of answers to open requests, but cannot keep this end busy with anything else.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from infra.sandbox.host_messages import ProtocolError
from infra.sandbox.service.frames import HEAD, FrameKind, FrameReader
from infra.sandbox.service.messages import WireError, error_of, failure_of, parse
from infra.sandbox.service.streams import Stream
from infra.sandbox.service.tls import abort
from schemas.errors import TransientError

logger = logging.getLogger(__name__)

BEAT_S = 5.0
SILENCE_BEATS = 12
"""After this many beats without a byte the other end counts as gone."""

MOST_REQUESTS = 4096
"""The most requests of the other end that are open at once, and the most streams."""

TOKENS = 20_000
TOKENS_PER_S = 10_000
TURN = 32
"""After this many frames in a row, others get a turn."""

REQUESTS = (
    *(FrameKind.CALL, FrameKind.DISCOVER, FrameKind.RESOLVE),
    *(FrameKind.OPEN_SOCKET, FrameKind.CLOSE_SOCKET),
)
STREAMS = (FrameKind.SNAPSHOT, FrameKind.CONNECT)
OF_STREAMS = (FrameKind.DATA, FrameKind.CREDIT, FrameKind.END, FrameKind.RESET)

Answer = Callable[[bytes], Awaitable[bytes]]
Carry = Callable[[Stream, bytes], Awaitable[None]]


class Peer:
    """The other end of a connection, as this end sees it. `lost` is set when the connection is over, and
    `why` says why."""

    def __init__(
        self,
        frames: FrameReader,
        writer: asyncio.StreamWriter,
        *,
        answers: dict[FrameKind, Answer],
        carriers: dict[FrameKind, Carry] | None = None,
    ) -> None:
        self._frames = frames
        self._writer = writer
        self._answers = answers
        self._carriers = carriers or {}
        self._requests: dict[int, asyncio.Future[bytes]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Stream] = {}
        self._carrying: set[asyncio.Task[None]] = set()
        self._next = 0
        self._tokens = float(TOKENS)
        self._counted_at = 0.0
        self.lost = asyncio.Event()
        self.why = ""

    async def run(self) -> None:
        """Handle frames until the connection is over. Then everything that was open has ended."""
        beats = asyncio.ensure_future(self._beat())
        try:
            await self._take_frames()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.why = self.why or "the connection was closed"
        except (ProtocolError, TimeoutError) as error:
            self.why = self.why or str(error) or "it sent half of a frame"
            logger.warning("a connection of the sandbox service is dropped: %s", self.why)
        finally:
            beats.cancel()
            self.lost.set()
            self._writer.close()
            await self._end_all()

    def drop(self, why: str) -> None:
        """End the connection."""
        self.why = self.why or why
        self.lost.set()
        abort(self._writer)

    async def request(self, kind: FrameKind, *parts: bytes) -> bytes:
        """Send a request and return the payload of its answer. Raises the error that it ended with, and
        TransientError when the connection is lost."""
        if self.lost.is_set():
            raise TransientError(f"the connection was lost: {self.why}")
        number = self._new_number()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._requests[number] = future
        try:
            self._send_parts(kind, number, parts)
            await self._drain()
            return await future
        except asyncio.CancelledError:
            self.send(FrameKind.CANCEL, number)
            raise
        finally:
            del self._requests[number]

    def open_stream(self, kind: FrameKind, payload: bytes) -> Stream:
        """Open a stream. Raises TransientError when the connection is lost."""
        if self.lost.is_set():
            raise TransientError(f"the connection was lost: {self.why}")
        number = self._new_number()
        self.send(kind, number, payload)
        return self._new_stream(number)

    def _new_number(self) -> int:
        self._next = self._next % 0xFFFFFFFF + 1
        return self._next

    def send(self, kind: FrameKind, number: int, payload: bytes = b"") -> None:
        """Send a frame."""
        self._send_parts(kind, number, (payload,) if payload else ())

    def _send_parts(self, kind: FrameKind, number: int, parts: Sequence[bytes]) -> None:
        head = HEAD.pack(sum(map(len, parts)), kind, number)
        if not self.lost.is_set():
            self._writer.writelines((head, *parts))

    async def _drain(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _take_frames(self) -> None:
        in_turn = 0
        while not self.lost.is_set():
            kind, number, payload = await self._frames.read()
            self._take(kind, number, payload)
            in_turn += 1
            if in_turn % TURN == 0:
                await asyncio.sleep(0)

    def _take(self, kind: FrameKind, number: int, payload: bytes) -> None:
        future = (
            self._requests.get(number) if kind in (FrameKind.RESULT, FrameKind.FAILURE) else None
        )
        if future is not None and not future.done():
            _settle(future, kind, payload)
            return
        stream = self._streams.get(number) if kind in OF_STREAMS else None
        if stream is None or len(payload) < 1024:
            self._pay()
        if stream is not None:
            stream.take(kind, payload)
        elif kind in REQUESTS:
            self._begin(kind, number, payload)
        elif kind in STREAMS:
            self._carry(kind, number, payload)
        elif kind is FrameKind.CANCEL and number in self._answering:
            self._answering[number].cancel()

    def _pay(self) -> None:
        """Take a token for a frame. Raises ProtocolError when none is left."""
        now = asyncio.get_running_loop().time()
        back = TOKENS_PER_S * (now - self._counted_at)
        self._tokens = min(float(TOKENS), self._tokens + back) - 1
        self._counted_at = now
        if self._tokens < 0:
            raise ProtocolError("it sent too many frames that nothing asked for")

    def _begin(self, kind: FrameKind, number: int, payload: bytes) -> None:
        if number in self._answering or len(self._answering) >= MOST_REQUESTS:
            raise ProtocolError("it sent too many requests, or a number that is in use")
        task = asyncio.ensure_future(self._answer(kind, number, payload))
        self._answering[number] = task
        task.add_done_callback(lambda _: self._answering.pop(number, None))

    async def _answer(self, kind: FrameKind, number: int, payload: bytes) -> None:
        try:
            answer = await self._answers[kind](payload)
        except ProtocolError as error:
            self.drop(str(error))
        except Exception as error:  # the other side gets any error
            failure = failure_of(error)
            if failure.kind == "failed":
                logger.exception("a request of kind %s failed", kind.name)
            self.send(FrameKind.FAILURE, number, failure.model_dump_json().encode())
        else:
            self.send(FrameKind.RESULT, number, answer)
            await self._drain()

    def _carry(self, kind: FrameKind, number: int, payload: bytes) -> None:
        if number in self._streams or len(self._streams) >= MOST_REQUESTS:
            raise ProtocolError("it opened too many streams, or one whose number is in use")
        stream = self._new_stream(number)
        task = asyncio.ensure_future(self._carry_stream(kind, stream, payload))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry_stream(self, kind: FrameKind, stream: Stream, payload: bytes) -> None:
        try:
            await self._carriers[kind](stream, payload)
        except ProtocolError as error:
            self.drop(str(error))
        except Exception as error:  # one stream must not end the others
            logger.warning("a stream of kind %s ended: %s", kind.name, type(error).__name__)
            stream.reset()

    def _new_stream(self, number: int) -> Stream:
        stream = Stream(number, self.send, self._forget)
        self._streams[number] = stream
        return stream

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)

    async def _beat(self) -> None:
        """Send a beat now and then, and drop the connection when the other end is silent. Beats are
        counted instead of seconds, because this process may have been stopped."""
        silent, heard = 0, -1
        while True:
            self.send(FrameKind.BEAT, 0)
            await asyncio.sleep(BEAT_S)
            silent = silent + 1 if self._frames.num_bytes == heard else 0
            heard = self._frames.num_bytes
            if silent >= SILENCE_BEATS:
                self.drop("the other end is silent")

    async def _end_all(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.lose()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(TransientError(f"the connection was lost: {self.why}"))
        tasks = [*self._answering.values(), *self._carrying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _settle(future: "asyncio.Future[bytes]", kind: FrameKind, payload: bytes) -> None:
    """Give a request its answer. Raises ProtocolError when the answer cannot be read."""
    if kind is FrameKind.RESULT:
        future.set_result(payload)
    else:
        future.set_exception(error_of(parse(WireError, payload)))
