"""The way out of a sandbox: a thread that pipes connections on 127.0.0.1 to the socket of the gateway.

A sandbox has no network. Clients that speak TCP connect to the relay, also those in child processes. The
SDK's own requests go to the socket directly.
"""

import asyncio
import contextlib
import os
import socket
import threading

GATEWAY_SOCKET = "/run/headrace/gateway.sock"
"""Where a sandbox finds the socket of its gateway. VARIABLE names another place if it is set."""

VARIABLE = "HEADRACE_GATEWAY_SOCKET"
NETWORK = "HEADRACE_NETWORK"
"""The variable with the addresses that user code may connect to, if there are any."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
DIRECT = "127.0.0.1,localhost,::1"

MOST_CONNECTIONS = 1024
BACKLOG = 128
RETRY_S = 0.005
REST_S = 0.1


def gateway_socket() -> str:
    """The path of the gateway's socket."""
    return os.environ.get(VARIABLE) or GATEWAY_SOCKET


def start(path: str) -> int:
    """Start the relay to the socket at `path`, and return its port on 127.0.0.1."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    listener.settimeout(0)
    threading.Thread(
        target=lambda: asyncio.run(serve(listener, path)), name="relay", daemon=True
    ).start()
    return int(listener.getsockname()[1])


def use_as_proxy(port: int) -> None:
    """Let clients in this process and its children use the relay as their HTTP proxy. Variables that
    the rollout has set stay."""
    for name in PROXIES:
        for spelling in (name, name.lower()):
            os.environ.setdefault(spelling, f"http://127.0.0.1:{port}")
    for spelling in ("NO_PROXY", "no_proxy"):
        os.environ.setdefault(spelling, DIRECT)


async def connect(path: str) -> socket.socket:
    """Connect to a unix socket. Waits while too many connections wait to be accepted, for which asyncio
    itself does not wait correctly. Raises OSError when nothing listens there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(0)
    try:
        while True:
            try:
                made.connect(path)
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)
            else:
                return made
    except BaseException:
        made.close()
        raise


class Pipe(asyncio.Protocol):
    """One end of a relayed connection. It writes what it receives to its `peer`, and reads no more than
    its peer can write."""

    def __init__(self) -> None:
        self.peer = self
        self.transport: asyncio.Transport | None = None
        self.ended = False
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream socket
        self.transport = transport
        if self.peer.transport is None:
            transport.pause_reading()
        else:
            self.peer.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.peer.transport is not None:
            self.peer.transport.write(data)

    def eof_received(self) -> bool:
        """Pass the end on. The connection stays open until both directions have ended."""
        self.ended = True
        peer = self.peer.transport
        if self.peer.ended or peer is None:
            return False
        peer.write_eof()
        return True

    def pause_writing(self) -> None:
        if self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        if self.peer.transport is not None:
            self.peer.transport.close()


async def serve(listener: socket.socket, path: str) -> None:
    """Relay connections, at most MOST_CONNECTIONS at a time. Further ones wait to be accepted."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(MOST_CONNECTIONS)
    relayed: set[asyncio.Task[None]] = set()
    try:
        while True:
            await room.acquire()
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # no file descriptor is left
                room.release()
                await asyncio.sleep(REST_S)
                continue
            task = asyncio.create_task(_relay(accepted, path))
            relayed.add(task)
            task.add_done_callback(relayed.discard)
            task.add_done_callback(lambda _: room.release())
    finally:
        for task in relayed:
            task.cancel()
        await asyncio.gather(*relayed, return_exceptions=True)


async def _relay(accepted: socket.socket, path: str) -> None:
    """Pipe a connection until both of its ends are closed."""
    loop = asyncio.get_running_loop()
    near, far = Pipe(), Pipe()
    near.peer, far.peer = far, near
    try:
        accepted.settimeout(0)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        upstream = await connect(path)
    except OSError:
        accepted.close()
        return
    try:
        await loop.connect_accepted_socket(lambda: far, upstream)
        await loop.connect_accepted_socket(lambda: near, accepted)
        await far.closed.wait()
        await near.closed.wait()
    except OSError:
        pass
    finally:
        for end in (near, far):
            if end.transport is not None:
                end.transport.abort()
        accepted.close()
        upstream.close()
