"""A small HTTP/1.1 client for the gateway: JSON in, JSON out, connections kept open.

The SDK has no dependencies, and `urllib` blocks; hundreds of attempts share one loop.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from headrace.relay import connect

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

LONGEST_BODY = 64 << 20

Idle = dict[str, list[Connection]]
"""Address -> connections that nobody uses now. An address is host:port, or the path of a socket."""

_kept: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[None], Idle]] = {}


class EndpointRefused(RuntimeError):
    """The endpoint refused a request. `code` is the code of its error, or None."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(f"the policy endpoint answered {status}: {message}")
        self.status = status
        self.code = code


async def post_json(
    url: str, body: object, *, key: str, socket: str | None = None
) -> dict[str, object]:
    """POST `body` and return the JSON answer. With `socket`, the request goes through the unix socket at
    that path. Raises EndpointRefused with the server's message when the server refuses the
    request, ConnectionError when the server is gone."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    content = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    request = head.encode() + content
    free = (await _idle()).setdefault(socket or f"{host}:{port}", [])
    while free:
        kept = free.pop()
        try:
            return await _post(kept, request, free)
        except _Idled:
            pass
    if socket is None:
        return await _post(await asyncio.open_connection(host, port), request, free)
    made = await asyncio.open_unix_connection(sock=await connect(socket))
    return await _post(made, request, free)


async def _idle() -> Idle:
    """Return the idle connections of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _kept:
        keeper = _close_with_loop(loop)
        _kept[loop] = (keeper, {})
        await anext(keeper)
    return _kept[loop][1]


async def _close_with_loop(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
    """Wait in `yield` until the loop ends. A loop that ends closes its generators, and this one then
    closes the connections."""
    try:
        yield
    finally:
        _, idle = _kept.pop(loop)
        for connections in idle.values():
            for _, writer in connections:
                writer.close()


async def _post(
    connection: Connection, request: bytes, free: list[Connection]
) -> dict[str, object]:
    """Send a request over this connection, and keep the connection if it can be used again."""
    try:
        status, answer, reusable = await _exchange(connection, request)
    except BaseException:
        connection[1].close()
        raise
    if reusable:
        free.append(connection)
    else:
        connection[1].close()
    if status != 200:
        raise EndpointRefused(status, *_reason(answer))
    found: dict[str, object] = json.loads(answer)
    return found


class _Idled(ConnectionError):
    """The connection was closed before the first byte of an answer. A server does that to a connection
    that was idle for a while, perhaps just when the next request is sent."""


async def _exchange(connection: Connection, request: bytes) -> tuple[int, bytes, bool]:
    reader, writer = connection
    gone = "the policy endpoint closed the connection"
    try:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise (ConnectionError(gone) if error.partial else _Idled(gone)) from error
    except ConnectionError as error:
        raise _Idled(gone) from error
    lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:] if line)
    }
    length = int(headers.get("content-length", "0"))
    if length > LONGEST_BODY:
        raise ConnectionError(
            f"the answer of the policy endpoint has {length} bytes, more than {LONGEST_BODY}; ask for "
            "fewer tokens"
        )
    try:
        answer = await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError(gone) from error
    reusable = headers.get("connection", "").lower() != "close"
    return int(lines[0].split()[1]), answer, reusable


def _reason(answer: bytes) -> tuple[str, str | None]:
    """The message and the code of an error."""
    try:
        error = json.loads(answer)["error"]
        code = error.get("code")
        return str(error["message"]), code if isinstance(code, str) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return answer[:200].decode(errors="replace"), None
