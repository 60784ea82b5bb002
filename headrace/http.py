"""A small HTTP/1.1 client for the gateway: JSON in, JSON out, connections kept open.

The SDK has no dependencies, and `urllib` blocks; hundreds of attempts share one loop.
"""

import asyncio
import json
from urllib.parse import urlsplit

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

LONGEST_BODY = 64 << 20

_idle: dict[tuple[asyncio.AbstractEventLoop, str, int], list[Connection]] = {}


async def post_json(url: str, body: object, *, key: str) -> dict[str, object]:
    """POST, return the JSON answer. Raises RuntimeError with the server's message on a refusal,
    ConnectionError when it is gone."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    place = (asyncio.get_running_loop(), host, port)
    content = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    free = _idle.setdefault(place, [])
    connection = free.pop() if free else await asyncio.open_connection(host, port)
    try:
        status, answer, reusable = await _exchange(connection, head.encode() + content)
    except BaseException:
        connection[1].close()
        raise
    if reusable:
        free.append(connection)
    else:
        connection[1].close()
    if status != 200:
        raise RuntimeError(f"the policy endpoint answered {status}: {_reason(answer)}")
    found: dict[str, object] = json.loads(answer)
    return found


async def _exchange(connection: Connection, request: bytes) -> tuple[int, bytes, bool]:
    reader, writer = connection
    writer.write(request)
    await writer.drain()
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the policy endpoint closed the connection") from error
    lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:] if line)
    }
    length = int(headers.get("content-length", "0"))
    if length > LONGEST_BODY:
        raise ConnectionError(f"the policy endpoint wants to send {length} bytes")
    answer = await reader.readexactly(length)
    reusable = headers.get("connection", "").lower() != "close"
    return int(lines[0].split()[1]), answer, reusable


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
