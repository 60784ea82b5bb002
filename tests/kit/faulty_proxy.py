"""A proxy in front of an HTTP server that causes the faults of networks and busy servers on request.

It runs in a thread of its own, so that both a test and the processes that it starts can use it. `plan`
receives each request and returns the fault to cause, or None. Forwarded bytes are unchanged except for
hop-by-hop headers, so signatures stay valid.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

HEAD_LIMIT = 1 << 16


class Fault(StrEnum):
    """The faults that a request can meet."""

    BUSY = "503 instead of doing it"
    CONFLICT = "409 instead of doing it"
    UNKNOWN = "501 instead of doing it"
    CUT = "the connection is cut before it is done"
    LOST = "it is done, and the connection is cut instead of an answer"
    LATE_BUSY = "it is done, and the answer is 503"
    LATE_CONFLICT = "it is done, and the answer is 409"
    TORN = "it is done, and the answer breaks off in its middle"
    SLOW = "it is done late"
    SLOW_ANSWER = "it is done, and the answer comes late"


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the proxy has received."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    head: bytes


Plan = Callable[[Request], Fault | None]

INSTEAD = {
    Fault.BUSY: (503, "Service Unavailable", "SlowDown"),
    Fault.CONFLICT: (409, "Conflict", "ConditionalRequestConflict"),
    Fault.UNKNOWN: (501, "Not Implemented", "NotImplemented"),
    Fault.LATE_BUSY: (503, "Service Unavailable", "SlowDown"),
    Fault.LATE_CONFLICT: (409, "Conflict", "ConditionalRequestConflict"),
}


def calm(request: Request) -> None:
    """A plan without faults."""


def first(*faults: Fault, method: str | None = None) -> Plan:
    """A plan with these faults, one for each of the first requests (of that method), and then none."""
    left = list(faults)

    def plan(request: Request) -> Fault | None:
        return left.pop(0) if left and method in (None, request.method) else None

    return plan


def chance(seed: int, *, rate: float, faults: tuple[Fault, ...]) -> Plan:
    """A plan with a random one of these faults on this share of the requests."""
    draw = random.Random(seed)

    def plan(request: Request) -> Fault | None:
        return draw.choice(faults) if draw.random() < rate else None

    return plan


@dataclass
class FaultyProxy:
    """The running proxy. `plan` may be changed at any time. `seen` counts the requests by their
    fault."""

    upstream: str
    plan: Plan
    delay_s: float
    endpoint: str = ""
    seen: Counter[Fault | None] = field(default_factory=Counter)
    _serving: set[asyncio.Task[None] | None] = field(default_factory=set)
    """The tasks of open connections. The event loop references its tasks only weakly, so a task whose
    client has disconnected while the server is still busy would be garbage-collected otherwise."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, with one request and at most one response."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        self._serving.add(task)
        try:
            request = await _request(reader, writer)
            if request is not None:
                await self._answer(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client has disconnected
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        fault = self.plan(request)
        self.seen[fault] += 1
        if fault in (Fault.BUSY, Fault.CONFLICT, Fault.UNKNOWN):
            writer.write(_refusal(fault, request))
            await writer.drain()
            return
        if fault is Fault.CUT:
            writer.transport.abort()
            return
        if fault is Fault.SLOW:
            await asyncio.sleep(self.delay_s)
        answer = await self._passed_on(request)
        if fault is Fault.LOST:
            writer.transport.abort()
            return
        if fault is Fault.SLOW_ANSWER:
            await asyncio.sleep(self.delay_s)
        if fault in (Fault.LATE_BUSY, Fault.LATE_CONFLICT):
            answer = _refusal(fault, request)
        writer.write(answer[: len(answer) // 2] if fault is Fault.TORN else answer)
        await writer.drain()

    async def _passed_on(self, request: Request) -> bytes:
        """The whole answer of the server."""
        parts = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(request.head + request.body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """Read a whole request; None when the client hung up instead."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = raw.decode("latin-1").strip().split("\r\n")
    method, target, _ = line.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (h.partition(":") for h in lines)}
    assert "transfer-encoding" not in headers, "requests in chunks are not understood here"
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    kept = [h for h in lines if h.partition(":")[0].lower() not in ("connection", "expect")]
    head = "\r\n".join([line, *kept, "Connection: close", "", ""]).encode("latin-1")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, target, headers, body, head)


def _refusal(fault: Fault, request: Request) -> bytes:
    status, reason, code = INSTEAD[fault]
    body = f"<Error><Code>{code}</Code><Message>{fault}</Message></Error>".encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if request.method == "HEAD" else head + body


@contextmanager
def faulty_proxy(
    upstream: str, plan: Plan = calm, *, delay_s: float = 1.0
) -> Iterator[FaultyProxy]:
    """Run a proxy in front of `upstream` inside the block, on a free port."""
    proxy = FaultyProxy(upstream, plan, delay_s)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="faulty_proxy", daemon=True)
    thread.start()
    listening = asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=HEAD_LIMIT)
    server = asyncio.run_coroutine_threadsafe(listening, loop).result(10)
    proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    """Close the server and cancel its tasks, including those of connections that were just accepted, so
    that nothing is left to the garbage collector."""
    server.close()
    await asyncio.sleep(0)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # closed transports say so, and connections made become tasks, in turns
            await asyncio.sleep(0)
