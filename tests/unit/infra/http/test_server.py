"""The HTTP server: what is served on a socket does not depend on other sockets."""

import asyncio
import socket
from pathlib import Path

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer


async def _app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("no request is sent")


class Received(asyncio.Protocol):
    """Collects the bytes of a connection."""

    def __init__(self) -> None:
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.data.set_result(data)


async def test_a_connection_with_the_descriptor_of_a_closed_socket_is_read(tmp_path: Path) -> None:
    """The run of a socket ends while another run connects. The kernel gives the new connection the
    number of the closed socket, for which the loop was still waiting."""
    loop, path = asyncio.get_running_loop(), tmp_path / "socket"
    errors: list[object] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    server = HttpServer(_app, host="127.0.0.1", port=0, limits=ConnectionLimits())
    before, other = socket.socketpair()
    number = before.fileno()
    before.close()
    server.listen_unix(path, state={}, connections=8)
    for _ in range(3):
        await asyncio.sleep(0)  # it waits for connections now
    server.close_unix(path)
    near, far = socket.socketpair()
    assert near.fileno() == number
    near.setblocking(False)
    received = Received()
    transport, _ = await loop.connect_accepted_socket(lambda: received, near)
    far.send(b"hello")
    async with asyncio.timeout(30):
        assert await received.data == b"hello"
    assert errors == []
    transport.close()
    for one in (far, other):
        one.close()
    await asyncio.sleep(0)
