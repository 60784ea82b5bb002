"""A server on this machine whose answers a test writes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from headrace.servers.attempts import ServedAttempt
from headrace.servers.loopback import Loopback

Answer = tuple[int, object] | tuple[int, object, dict[str, str]] | bytes
"""Status, JSON and headers, or the bytes of an answer."""

Script = Callable[[str, Any], Awaitable[Answer]]
"""Answers `METHOD /path` with a body."""

ATTEMPT = ServedAttempt(
    name="run-1 ü/0",
    messages=[{"role": "user", "content": "hi"}],
    label="4",
    metadata={},
    chat_url="http://127.0.0.1:1/v1/samples/one",
    api_key="key",
    agent_timeout_s=1.0,
    grader_timeout_s=1.0,
)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Loopback]:
    """A client of a server that answers by the script."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.partition("content-length: ")[2].split("\r\n")[0])
        body = await reader.readexactly(size)
        answer = await script(" ".join(head.split(" ")[:2]), json.loads(body) if body else None)
        if not isinstance(answer, bytes):
            status, said, *more = answer
            data = json.dumps(said).encode()
            lines = {"content-length": str(len(data)), **(more[0] if more else {})}
            text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            answer = f"HTTP/1.1 {status} Said\r\n{text}\r\n".encode() + data
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Loopback(server.sockets[0].getsockname()[1])
    finally:
        server.close()
