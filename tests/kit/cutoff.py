"""A network that can be cut: a proxy on loopback that forwards, or swallows everything in silence.

While it is cut nothing arrives and nobody is told, as when a switch loses power: connections stay open
and stall, new ones are taken and never answered. When it is healed, the stalled ones go on, or (with
`forget`) they are dead for good without anyone being told, as behind a firewall that lost its state.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Line:
    """One connection. `dead`: whatever is sent over it disappears."""

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    dead: bool = False


class Cutoff:
    """The proxy. `port` forwards to the target's."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lines: set[_Line] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._whole = asyncio.Event()
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

    def cut(self, *, forget: bool = False) -> None:
        """From now on nothing arrives. `forget`: what is open now never works again."""
        self._loop.call_soon_threadsafe(self._cut, forget)

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
        for line in self._lines:
            for writer in line.writers:
                writer.transport.abort()
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        if others:
            await asyncio.wait(others, timeout=5)

    def _cut(self, forget: bool) -> None:
        self._whole.clear()
        if forget:
            for line in self._lines:
                line.dead = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Line([writer])
        self._lines.add(line)
        try:
            await self._whole.wait()
            back, forth = await asyncio.open_connection(*self._target)
            line.writers.append(forth)
            await asyncio.gather(self._pump(line, reader, forth), self._pump(line, back, writer))
        except OSError:
            pass
        finally:
            self._lines.discard(line)
            for one in line.writers:
                one.close()

    async def _pump(
        self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            await self._whole.wait()
            if not line.dead:
                writer.write(data)
                await writer.drain()
        if not line.dead:
            with suppress(OSError):
                writer.write_eof()


@contextmanager
def cutoff(host: str, port: int) -> Iterator[Cutoff]:
    """A proxy before a server on this machine."""
    proxy = Cutoff(host, port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
