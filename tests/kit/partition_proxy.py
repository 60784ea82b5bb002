"""A network that can be cut: a proxy on loopback that forwards everything, or silently drops it.

While it is cut, nothing arrives and neither side gets an error, as when a switch loses power.
Connections stay open and stall, and new ones are accepted and never answered. After it is healed,
stalled connections continue. With `forget` they are dead permanently, again without an error, as behind
a firewall that lost its state. With `late`, the data that was sent over them arrives when the test calls
`deliver`, long after their client has given them up.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Line:
    """One connection. With `dead`, all data that is sent over it is dropped. With `late`, the data waits
    for `deliver`. `stalled` is the data that its client sent during the cut."""

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    dead: bool = False
    late: bool = False
    stalled: bytes = b""
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class PartitionProxy:
    """The proxy. It forwards connections to its `port` to the target."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lines: set[_Line] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._whole = asyncio.Event()
        self._late = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.port = 0

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self, *, forget: bool = False, late: bool = False) -> None:
        """Cut the network, so that nothing arrives. With `forget`, the open connections never work
        again. With `late`, they stall, and the data that their clients still send is kept for
        `deliver`."""
        asyncio.run_coroutine_threadsafe(self._cut(forget, late), self._loop).result(10)

    def deliver(self) -> int:
        """Deliver to the server the data that was sent over connections that were cut `late`, although
        their clients are gone, and wait for the answers. Returns how many connections had data."""
        return asyncio.run_coroutine_threadsafe(self._deliver(), self._loop).result(30)

    def heal(self) -> None:
        self._loop.call_soon_threadsafe(self._whole.set)

    async def _start(self) -> None:
        self._whole.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._whole.set()
        self._late.set()
        for line in self._lines:
            for writer in line.writers:
                writer.transport.abort()
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        if others:
            await asyncio.wait(others, timeout=5)

    async def _cut(self, forget: bool, late: bool) -> None:
        self._whole.clear()
        for line in self._lines:
            line.dead |= forget
            line.late |= late

    async def _deliver(self) -> int:
        waiting = [line for line in self._lines if line.late and line.stalled]
        for line in waiting:
            line.answered.clear()
            line.writers[1].write(line.stalled)
            line.stalled = b""
        for line in waiting:
            async with asyncio.timeout(20):
                await line.answered.wait()
        self._late.set()
        return len(waiting)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Line([writer])
        self._lines.add(line)
        try:
            await self._whole.wait()
            back, forth = await asyncio.open_connection(*self._target)
            line.writers.append(forth)
            await asyncio.gather(
                self._forward(line, reader, forth), self._backward(line, back, writer)
            )
        except OSError:
            pass
        finally:
            self._lines.discard(line)
            for one in line.writers:
                one.close()

    async def _forward(
        self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From the client to the server."""
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if line.late:
                    line.stalled += data
                    continue
                await self._whole.wait()
                if not line.dead:
                    writer.write(data)
                    await writer.drain()
        if line.late:
            await self._late.wait()  # the client is gone, what it sent is still on its way
        if not line.dead:
            with suppress(OSError):
                writer.write_eof()

    async def _backward(
        self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From the server to the client."""
        while data := await reader.read(65536):
            line.answered.set()
            if line.late:
                continue
            await self._whole.wait()
            if not line.dead:
                with suppress(ConnectionError):
                    writer.write(data)
                    await writer.drain()
        line.answered.set()
        if not line.dead:
            with suppress(OSError):
                writer.write_eof()


@contextmanager
def partition_proxy(host: str, port: int) -> Iterator[PartitionProxy]:
    """A proxy in front of a server on this machine."""
    proxy = PartitionProxy(host, port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
