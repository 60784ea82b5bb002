"""uvicorn's HTTP server behind a listener of our own, for the gateway and for the API.

At the limit of open files, asyncio's listener logs one line per entry of its backlog and then tries
again. This listener accepts one connection at a time. At the limit it closes connections that only
wait, and pauses if there are none. Connections of addresses that were refused too often are closed
before anything else is done for them.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from infra.http.failed_auth_throttle import FailedAuthThrottle
from infra.http.limits import ConnectionLimits, LimitedProtocol, OpenConnections
from infra.http.token_bucket import TokenBucket
from infra.rate_limited_log import RateLimit
from schemas.errors import InvalidConfig

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

BACKLOG = 1024
UNIX_BACKLOG = 32
ACCEPTED_PER_S, ACCEPTED_AT_ONCE = 250, 2048
"""How fast a unix socket accepts connections. Accepting takes time from all other sockets."""

TURNED_AWAY_AT_ONCE = 128
"""How many connections are turned away before others have a turn."""

RESET = struct.pack("ii", 1, 0)
LONGEST_PATH = 107
"""The longest path of a unix socket, in bytes."""
REST_S = 0.5
NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True)
class _Listener:
    """A listening socket and its connections. `state` is `scope["state"]` of their requests."""

    socket: socket.socket
    connections: OpenConnections
    state: dict[str, Any] = field(default_factory=dict)
    protocol: type[LimitedProtocol] = LimitedProtocol
    pace: TokenBucket | None = None
    accepting: "asyncio.Task[None] | None" = None

    def close(self) -> None:
        if self.accepting is not None:
            self.accepting.cancel()
            # The loop would forget the descriptor only later, when a new connection may have it already.
            asyncio.get_running_loop().remove_reader(self.socket)
        self.socket.close()


class HttpServer:
    """Serves an ASGI application until `stop` is called. `port` 0 means a free port. Unix sockets can
    be added and removed while it runs."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        limits: ConnectionLimits,
        keep_alive_s: float = 5,
        graceful_s: int = 3,
        throttle: FailedAuthThrottle | None = None,
    ) -> None:
        """`throttle` says which addresses are turned away."""
        self._host, self._port = host, port
        self._config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            http="httptools",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # seconds, a float to asyncio
            timeout_graceful_shutdown=graceful_s,
        )
        self._server = _Server(self._config)
        self._limits = limits
        self._throttle = throttle
        self._sockets: list[socket.socket] = []
        self._unix: dict[Path, _Listener] = {}
        logging.getLogger("uvicorn.error").addFilter(_UVICORN)

    @property
    def port(self) -> int:
        """The port that the server listens on. Available after `listen`."""
        return int(self._sockets[0].getsockname()[1])

    async def listen(self) -> None:
        """Bind the sockets and listen. Raises InvalidConfig when the host or port cannot be used."""
        loop = asyncio.get_running_loop()
        missing: OSError | None = None
        try:
            found = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, address in dict.fromkeys(found):
                try:
                    self._sockets.append(_bind(family, address))
                except OSError as error:
                    if error.errno not in NO_SUCH_ADDRESS:
                        raise
                    missing = error  # a name may resolve to IPv6 on a machine without IPv6
            if missing is not None and not self._sockets:
                raise missing
        except OSError as error:
            self._close()
            raise InvalidConfig(
                f"cannot listen on {self._host}:{self._port} ({error.strerror or error}); choose "
                "another host or port with HEADRACE_URL"
            ) from error

    def listen_unix(
        self,
        path: Path,
        *,
        state: dict[str, Any],
        connections: int,
        group: int | None = None,
        protocol: type[LimitedProtocol] = LimitedProtocol,
    ) -> None:
        """Serve a new unix socket at `path` by `protocol`, with at most this many connections. Its
        requests have `state` in their scope. Only this user can connect, and the users of `group` if it
        is given. Raises InvalidConfig when the path is too long, and OSError when the socket cannot be
        made."""
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise InvalidConfig(
                f"the path {path} has more than {LONGEST_PATH} bytes, so no socket can be there; set "
                "TMPDIR to a shorter path"
            )
        limits = replace(self._limits, connections=connections)
        pace = TokenBucket(per_s=ACCEPTED_PER_S, burst=ACCEPTED_AT_ONCE)
        open_ = OpenConnections(limits)
        listener = _Listener(_bind_unix(path, group), open_, state, protocol, pace)
        self._load()
        self._unix[path] = listener
        listener.accepting = asyncio.ensure_future(self._accept(listener))

    def close_unix(self, path: Path) -> None:
        """Close a unix socket with all its connections, and remove it. Does nothing if it is closed."""
        listener = self._unix.pop(path, None)
        if listener is not None:
            listener.close()
            listener.connections.abort()
            path.unlink(missing_ok=True)

    def num_connections(self, path: Path) -> int:
        """How many connections a unix socket has now."""
        return self._unix[path].connections.num

    async def serve(self) -> None:
        """Serve on the sockets that `listen` opened, until `stop` is called."""
        self._load()
        connections = OpenConnections(self._limits)
        listeners = [_Listener(one, connections) for one in self._sockets]
        for listener in listeners:
            listener.accepting = asyncio.ensure_future(self._accept(listener))
        self._server.on_shutdown = lambda: self._stop_accepting(listeners)
        try:
            await self._server.serve(sockets=[])
        finally:
            tasks = self._stop_accepting(listeners)
            await asyncio.gather(*tasks, return_exceptions=True)
            for path in tuple(self._unix):
                self.close_unix(path)
            self._close()

    def _stop_accepting(self, listeners: list[_Listener]) -> list["asyncio.Task[None]"]:
        all_listeners = (*listeners, *self._unix.values())
        tasks = [one.accepting for one in all_listeners if one.accepting is not None]
        for task in tasks:
            task.cancel()
        return tasks

    def _load(self) -> None:
        if not self._config.loaded:
            self._config.load()

    def stop(self) -> None:
        """End `serve`: accept no new connections, and give open requests a moment to finish."""
        self._server.should_exit = True

    async def _accept(self, listener: _Listener) -> None:
        connections = listener.connections
        while True:
            await connections.wait_for_room()
            if listener.pace is not None:
                await listener.pace.take()
            try:
                accepted = await self._next(listener.socket)
            except OSError as error:
                logger.warning("a connection cannot be accepted: %s", error.strerror or error)
                closed = error.errno in OUT_OF_FILES and connections.make_room()
                await asyncio.sleep(0 if closed else REST_S)
                continue
            accepted.settimeout(0)
            if accepted.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._take(accepted, listener)

    async def _next(self, listener: socket.socket) -> socket.socket:
        """The next connection that is not turned away."""
        loop = asyncio.get_running_loop()
        if self._throttle is None:
            return (await loop.sock_accept(listener))[0]
        while True:
            for _ in range(TURNED_AWAY_AT_ONCE):
                try:
                    accepted, address = listener.accept()
                except BlockingIOError:
                    accepted, address = await loop.sock_accept(listener)
                if listener.family == socket.AF_UNIX or not self._throttle.must_leave(address[0]):
                    return accepted
                _turn_away(accepted)
            await asyncio.sleep(0)

    async def _take(self, accepted: socket.socket, listener: _Listener) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: listener.protocol(
                    self._config, self._server.server_state, listener.connections, listener.state
                ),
                accepted,
            )
        except OSError as error:
            accepted.close()
            logger.warning("a connection was lost while it was accepted: %s", error)

    def _close(self) -> None:
        for listener in self._sockets:
            listener.close()


def _turn_away(accepted: socket.socket) -> None:
    """Reset a connection, so that nothing of it stays."""
    with contextlib.suppress(OSError):
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    accepted.close()


class _Server(uvicorn.Server):
    on_shutdown: Callable[[], object]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process has its own, which uvicorn's would replace."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_shutdown()
        await super().shutdown(sockets)


_UVICORN = RateLimit()
"""Limits how often uvicorn logs invalid requests and exceptions of the application."""


def _bind(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_unix(path: Path, group: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(0o600 if group is None else 0o660)
        listener.listen(UNIX_BACKLOG)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener
