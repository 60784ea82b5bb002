"""The sockets to the gateway, as a service makes them for its sandboxes.

A service on the worker's own machine uses the worker's sockets. A service elsewhere makes sockets of its
own and carries their bytes to the worker, which connects them to its sockets.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from infra.http.socket_directory import SocketDirectory
from infra.sandbox.service.frames import FrameKind
from infra.sandbox.service.messages import SocketName, SocketRequest, parse
from infra.sandbox.service.peer import Peer
from infra.sandbox.service.streams import join
from infra.sandbox.user_process import user_group
from schemas.errors import TransientError

MOST_CONNECTIONS = 256
"""The most connections of one socket. Further ones are closed."""

BACKLOG = 32


class RemoteSockets:
    """`infra.ports.services.GatewaySockets` by the client's own sockets."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def open_socket(self, run: str, *, network: Sequence[str] = ()) -> Path:
        """Ask the client for a socket."""
        request = SocketRequest(run=run, network=tuple(network))
        answer = await self._peer.request(FrameKind.OPEN_SOCKET, request.model_dump_json().encode())
        return Path(parse(SocketName, answer).socket)

    async def close_socket(self, path: Path) -> None:
        """Ask the client to close a socket. If the connection is lost, the client has closed it."""
        if self._peer.lost.is_set():
            return
        name = SocketName(socket=str(path))
        await self._peer.request(FrameKind.CLOSE_SOCKET, name.model_dump_json().encode())

    async def aclose(self) -> None:
        """Do nothing: the client closes its sockets with the connection."""


class CarriedSockets:
    """`infra.ports.services.GatewaySockets` by sockets of this machine, whose connections are carried to
    the sockets of the client."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._remote = RemoteSockets(peer)
        self._directory: SocketDirectory | None = None
        self._open: dict[Path, _Carrier] = {}

    async def open_socket(self, run: str, *, network: Sequence[str] = ()) -> Path:
        """Open a socket here and one at the client."""
        group = user_group()
        if self._directory is None:
            self._directory = SocketDirectory(group=group)
        there = await self._remote.open_socket(run, network=network)
        here = self._directory.new_path()
        carrier = _Carrier(self._peer, there)
        carrier.server = await asyncio.start_unix_server(
            carrier.carry, here, backlog=BACKLOG, limit=1 << 16
        )
        if group is not None:
            os.chown(here, -1, group)
        here.chmod(0o660 if group is not None else 0o600)
        self._open[here] = carrier
        return here

    async def close_socket(self, path: Path) -> None:
        """Close both sockets and end their connections."""
        carrier = self._open.pop(path, None)
        if carrier is not None:
            carrier.close()
            await asyncio.to_thread(path.unlink, missing_ok=True)
            await self._remote.close_socket(carrier.there)

    async def aclose(self) -> None:
        """Close all sockets."""
        for carrier in self._open.values():
            carrier.close()
        self._open.clear()
        if self._directory is not None:
            self._directory.close()
            self._directory = None


class _Carrier:
    """Carries the connections of one socket."""

    def __init__(self, peer: Peer, there: Path) -> None:
        self.there = there
        self.server: asyncio.Server | None = None
        self._peer = peer
        self._tasks: set[asyncio.Task[None]] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until it ends."""
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= MOST_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            name = SocketName(socket=str(self.there)).model_dump_json().encode()
            stream = self._peer.open_stream(FrameKind.CONNECT, name)
            await join(stream, reader, writer)
        except (TransientError, asyncio.CancelledError):
            writer.close()
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for task in tuple(self._tasks):
            task.cancel()
