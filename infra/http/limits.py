"""Limits on what an HTTP client may use before it has sent its request: time, bytes, connections.

uvicorn limits none of these: its `timeout_keep_alive` only covers the time between two requests
(docs/decisions/0044-limit-clients-inside-uvicorn.md says why it stays). Here a connection has one
deadline for the head of a request and one for the body, and a head has a maximum size. When there are
too many connections, those that wait for a head are closed, oldest first.
"""

import asyncio
import logging
import resource
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from infra.http.graceful_close import GracefulTransport

logger = logging.getLogger(__name__)

LARGEST_HEAD = 64 << 10
EVICTED_S = 5.0
MOST_LINGERING = 32
"""How many connections of a server may send the rest of a refused body at the same time."""

READ_BYTES = 64 << 10
"""How much of a connection is read at once. uvicorn keeps it until the application has answered, also if
the client is refused then, and asyncio's 256 KiB of each of a hundred connections are 50 MiB."""

NO_PROGRESS = 256 << 10
"""How many bytes of chunk sizes and trailers may arrive without a byte of the body."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one server, in seconds and bytes.

    `head_s` is the time for a request's head, from its first byte or the start of the connection.
    `body_s` is the time for its body, plus one second per `body_rate` bytes received; time in which the
    server does not read does not count. `write_s` is how long a client may read nothing of an answer.
    `connections` is the maximum number of open connections; None means half of the files that this
    process may open, at most 4096. When a request is answered before its body was read, up to `dropped`
    bytes of the body are read and dropped before the connection is closed."""

    head_s: float = 10.0
    body_s: float = 30.0
    body_rate: int = 64 << 10
    write_s: float = 120.0
    connections: int | None = None
    dropped: int = 0

    def max_connections(self) -> int:
        """How many connections may be open at the same time."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = max(8, min(4096, soft // 2))
        return allowed if self.connections is None else min(self.connections, allowed)


class Phase(Enum):
    """The thing that a connection waits for. FIRST: the head of its first request. IDLE: the head of its
    next request. BODY: the rest of a request's body. ANSWER: the application's response."""

    FIRST = auto()
    IDLE = auto()
    BODY = auto()
    ANSWER = auto()


class OpenConnections:
    """The open connections of a server, by the phase that they are in."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.most = limits.max_connections()
        self.num = 0
        self.num_lingering = 0
        self._all: set[LimitedProtocol] = set()
        self._waiting: dict[Phase, dict[LimitedProtocol, None]] = {Phase.FIRST: {}, Phase.IDLE: {}}
        self._left = asyncio.Event()

    def enter(self, connection: "LimitedProtocol") -> None:
        if self.num >= self.most:
            self.make_room()
        self.num += 1
        self._all.add(connection)
        self.move(connection, None, Phase.FIRST)

    def leave(self, connection: "LimitedProtocol", phase: Phase) -> None:
        self.num -= 1
        self._all.discard(connection)
        self.move(connection, phase, None)
        self._left.set()

    def move(self, connection: "LimitedProtocol", old: Phase | None, new: Phase | None) -> None:
        """Record that a connection has changed from one phase to another."""
        if old in self._waiting:
            self._waiting[old].pop(connection, None)
        if new in self._waiting:
            self._waiting[new][connection] = None
            self._left.set()  # it may be closed to make room for another connection

    def make_room(self) -> bool:
        """Close the connection that has waited longest for a head. Connections that never had an
        answered request are closed first. Returns False if no connection waits for a head."""
        for waiting in self._waiting.values():
            if waiting:
                connection = next(iter(waiting))
                del waiting[connection]
                connection.evict()
                return True
        return False

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in tuple(self._all):
            connection.abort()

    async def wait_for_room(self) -> None:
        """Wait until another connection may be accepted."""
        while self.num >= self.most and not any(self._waiting.values()):
            self._left.clear()
            await self._left.wait()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol for one connection, with our limits."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        connections: OpenConnections,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config=config, server_state=state, app_state=app_state)
        self._registry = connections
        self._limits = connections.limits
        self._phase = Phase.FIRST
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._body_bytes = 0
        self._barren_bytes = 0
        self._body_by = 0.0
        self._gone = False
        self._lingering: GracefulTransport | None = None
        self._has_lingered = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES
        if self._limits.dropped:
            self._lingering = GracefulTransport(transport, self._most_dropped)
            self.transport = self._lingering  # type: ignore[assignment]  # it has all its methods
        self._registry.enter(self)
        self._arm(self._limits.head_s, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._write_timer is not None:
            self._write_timer.cancel()
        if not self._gone:
            self._gone = True
            self._registry.leave(self, self._phase)
        if self._lingering is not None and self._lingering.is_lingering:
            self._lingering.forget()
        if self._has_lingered:
            self._registry.num_lingering -= 1
        super().connection_lost(exc)
        self._forget_body()

    def abort(self) -> None:
        """Close the connection at once and drop data that is not sent yet."""
        self._disarm()
        self.transport.abort()

    def evict(self) -> None:
        """Close a connection that waits for a head. Data that is not sent yet may be sent for another
        EVICTED_S seconds."""
        self._disarm()
        if self.transport.get_write_buffer_size():
            self.transport.close()
            self.loop.call_later(EVICTED_S, self.transport.abort)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            if self._lingering is not None and self._lingering.is_lingering:
                self._lingering.drop(data)
            return
        if self._phase in (Phase.FIRST, Phase.IDLE) and self._timer is None:
            self._arm(self._limits.head_s, self._head_overdue)
        before = self._body_bytes
        super().data_received(data)
        if self._phase in (Phase.FIRST, Phase.IDLE):
            self._head_bytes += len(data)
            if self._head_bytes > LARGEST_HEAD:
                self._refuse(
                    431,
                    f"the head of this request is larger than {LARGEST_HEAD} bytes; send fewer headers",
                )
        elif self._phase is Phase.BODY:
            self._barren_bytes = 0 if self._body_bytes > before else self._barren_bytes + len(data)
            if self._barren_bytes > NO_PROGRESS:
                self.abort()

    def on_headers_complete(self) -> None:
        self._head_bytes = self._body_bytes = self._barren_bytes = 0
        self._move(Phase.BODY)
        self._body_by = self.loop.time() + self._limits.body_s
        self._arm(self._limits.body_s, self._body_overdue)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        answered = self.cycle is not None and self.cycle.response_complete
        self._move(Phase.IDLE if answered else Phase.ANSWER)
        super().on_message_complete()
        if answered and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is Phase.ANSWER and self.cycle.response_complete:
            self._move(Phase.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _most_dropped(self) -> int:
        """How many bytes of the rest of this request's body are read and dropped."""
        if self._gone or self._phase is not Phase.BODY:
            return 0
        if self._registry.num_lingering >= MOST_LINGERING:
            return 0
        self._disarm()
        self._registry.num_lingering += 1
        self._has_lingered = True
        self._forget_body()
        return self._limits.dropped

    def _forget_body(self) -> None:
        """Free the part of a body that nobody will read. A closed connection is a reference cycle, so
        it would keep the part until Python looks for cycles."""
        if self.cycle is not None:
            self.cycle.body = bytearray()

    def _move(self, phase: Phase) -> None:
        if not self._gone:
            self._registry.move(self, self._phase, phase)
        self._phase = phase

    def _arm(self, seconds: float, overdue: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, overdue)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_overdue(self) -> None:
        self._timer = None
        if self._head_bytes:
            self._refuse(
                408, f"the head of this request did not arrive within {self._limits.head_s:g} s"
            )
        else:
            self.abort()

    def _body_overdue(self) -> None:
        """Refuse a body that is late. It gets more time if enough of it has arrived, or if the server
        did not read."""
        self._timer = None
        now = self.loop.time()
        if self.flow.read_paused:
            self._body_by = max(self._body_by, now + 1.0)
        left = self._body_by + self._body_bytes / self._limits.body_rate - now
        if left > 0:
            self._arm(left, self._body_overdue)
            return
        if self.cycle is not None and not self.cycle.response_started and not self.pipeline:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._refuse(
                408,
                f"the body of this request arrives too slowly ({self._body_bytes} bytes so far)",
            )
        else:
            self.abort()

    def _refuse(self, status: int, text: str) -> None:
        """Send an error response without calling the application, and close the connection."""
        if self.transport.is_closing():
            return
        self._disarm()
        body = text.encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
