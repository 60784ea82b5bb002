"""A connection on the socket of a sandbox: requests to the gateway, or a tunnel (CONNECT)."""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from infra.http.limits import LimitedProtocol, OpenConnections, Phase
from infra.model_api.gateway.tunnels import TunnelRefused, Tunnels

CONNECT = b"CONNECT "
LARGEST_HEAD = 8 << 10
IDLE_S = 300.0
"""How long a tunnel may carry nothing before it is closed."""


class SandboxProtocol(LimitedProtocol):
    """One connection of a sandbox. The first bytes decide what it is."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        connections: OpenConnections,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, state, connections, app_state)
        self._tunnels: Tunnels = app_state["tunnels"]
        self._first: bytearray | None = bytearray()
        self._opening: asyncio.Task[None] | None = None
        self._remote: _Remote | None = None

    def data_received(self, data: bytes) -> None:
        if self._remote is not None:
            self._remote.write(data)
        elif self._first is None:
            super().data_received(data)
        elif self._opening is None:
            self._first += data
            self._decide()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio reads the result
        if self._remote is not None:
            return self._remote.end()
        super().eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._opening is not None:
            self._opening.cancel()
        if self._remote is not None:
            self._remote.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._remote is not None:
            self._remote.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._remote is not None:
            self._remote.resume_reading()

    def _decide(self) -> None:
        """Serve a request, open a tunnel, or wait for the rest of the first line or head."""
        first = bytes(self._first or b"")
        if not CONNECT.startswith(first[: len(CONNECT)]):
            self._first = None
            super().data_received(first)
            return
        head, end, rest = first.partition(b"\r\n\r\n")
        if end:
            self._disarm()
            self._move(Phase.ANSWER)
            self.transport.pause_reading()
            target = head[len(CONNECT) :].split(b" ", 1)[0].decode("latin-1")
            self._opening = self.loop.create_task(self._open(target, rest))
        elif len(first) > LARGEST_HEAD:
            self._refuse(431, f"the head is larger than {LARGEST_HEAD} bytes; send fewer headers")

    async def _open(self, target: str, rest: bytes) -> None:
        """Connect to `target`, say so, and send it what the client sent ahead."""
        try:
            connected = await self._tunnels.open(target)
        except TunnelRefused as error:
            self._refuse(error.status, error.message)
            return
        remote = _Remote(self.transport, self._tunnels)
        try:
            await self.loop.create_connection(lambda: remote, sock=connected)
        except BaseException:
            connected.close()
            if remote.transport is None:
                self._tunnels.release()
            raise
        if self.transport.is_closing():
            remote.abort()
            return
        self._remote = remote
        self.transport.write(b"HTTP/1.1 200 Connection Established\r\n\r\n")
        remote.write(rest)
        remote.resume_reading()
        remote.resume_writing()


class _Valve:
    """Reads one end of a tunnel while nothing is against it: that the other end cannot write, or that
    the tunnels of the socket have carried too much."""

    def __init__(self, end: asyncio.Transport) -> None:
        self._end = end
        self._is_full = False
        self._resting: asyncio.TimerHandle | None = None

    def fill(self) -> None:
        """Stop, because the other end cannot write."""
        self._is_full = True
        self._end.pause_reading()

    def drain(self) -> None:
        """The other end can write again."""
        self._is_full = False
        self._open()

    def rest(self, seconds: float) -> None:
        """Stop for this time."""
        if seconds > 0 and self._resting is None:
            self._end.pause_reading()
            self._resting = asyncio.get_running_loop().call_later(seconds, self._end_rest)

    def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()

    def _end_rest(self) -> None:
        self._resting = None
        self._open()

    def _open(self) -> None:
        if not self._is_full and self._resting is None:
            self._end.resume_reading()


class _Remote(asyncio.Protocol):
    """The far end of a tunnel. Each end reads no more than the other can write, and both together no
    more than their rate."""

    def __init__(self, sandbox: asyncio.Transport, tunnels: Tunnels) -> None:
        self.transport: asyncio.Transport | None = None
        self._sandbox = sandbox
        self._from_sandbox = _Valve(sandbox)
        self._from_remote: _Valve | None = None
        self._tunnels = tunnels
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._num_ended = 0
        self._idle = self._loop.call_later(IDLE_S, self._check_idle)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream socket
        self.transport = transport
        self._from_remote = _Valve(transport)
        self._from_remote.fill()  # until the sandbox knows that the tunnel is open

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.cancel()
        self._from_sandbox.close()
        if self._from_remote is not None:
            self._from_remote.close()
        self._tunnels.release()
        self._sandbox.close()

    def data_received(self, data: bytes) -> None:
        if self._may_pass(data):
            self._sandbox.write(data)
            if self._from_remote is not None:
                self._from_remote.rest(self._tunnels.rest_s())

    def eof_received(self) -> bool:
        self._num_ended += 1
        if self._num_ended == 1:
            self._sandbox.write_eof()
        return self._num_ended == 1

    def pause_writing(self) -> None:
        self._from_sandbox.fill()

    def resume_writing(self) -> None:
        self._from_sandbox.drain()

    def write(self, data: bytes) -> None:
        """Send what the sandbox sent."""
        if self.transport is not None and self._may_pass(data):
            self.transport.write(data)
            self._from_sandbox.rest(self._tunnels.rest_s())

    def end(self) -> bool:
        """Pass on that the sandbox sends no more. Returns whether the tunnel stays open."""
        self._num_ended += 1
        if self._num_ended == 1 and self.transport is not None:
            self.transport.write_eof()
        return self._num_ended == 1

    def pause_reading(self) -> None:
        if self._from_remote is not None:
            self._from_remote.fill()

    def resume_reading(self) -> None:
        if self._from_remote is not None:
            self._from_remote.drain()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _may_pass(self, data: bytes) -> bool:
        """Count these bytes. When there are too many, close both ends."""
        self._moved_at = self._loop.time()
        if self._tunnels.spend(len(data)):
            return True
        self._close_both()
        return False

    def _check_idle(self) -> None:
        left = self._moved_at + IDLE_S - self._loop.time()
        if left > 0:
            self._idle = self._loop.call_later(left, self._check_idle)
        else:
            self._close_both()

    def _close_both(self) -> None:
        self.abort()
        self._sandbox.abort()
