"""A small HTTP client for a server on this machine: one connection per request, answers bounded."""

import asyncio
import contextlib
import json
from dataclasses import dataclass

LARGEST_ANSWER = 16 << 20
MOST_HEADERS = 64 << 10


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """Read the begin of a message: its first line, and its headers by their names in lower case. Raises
    EOFError and LimitOverrunError."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    return first, {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines if line)
    }


class ServerAway(ConnectionError):
    """The server does not answer, or answers with something that is not HTTP."""


@dataclass(frozen=True)
class Reply:
    """An answer. The names of `headers` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def excerpt(self) -> str:
        """Return the begin of the body as text."""
        return self.body[:300].decode(errors="replace")

    def retry_after_s(self, default: float, *, most: float = 60.0) -> float:
        """Return how long the server asks its client to wait, in seconds."""
        try:
            asked = float(self.headers.get("retry-after", ""))
        except ValueError:
            return default
        return min(max(asked, 0.05), most) if asked == asked else default


class Loopback:
    """Requests to the server on `port` of 127.0.0.1. `answered_at` is the time of its last answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answered_at = 0.0

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        headers: dict[str, str] | None = None,
        timeout_s: float,
    ) -> Reply:
        """Make a request and return its answer. Raises ServerAway."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = {
            "host": f"127.0.0.1:{self.port}",
            "connection": "close",
            "accept": "application/json",
            **({} if body is None else {"content-type": "application/json"}),
            "content-length": str(len(content)),
            **(headers or {}),
        }
        head = f"{method} {path} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(head.encode("latin-1") + content)
        except TimeoutError as error:
            raise ServerAway(f"{method} {path} was not answered within {timeout_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            raise ServerAway(f"{method} {path} failed: {error or type(error).__name__}") from error
        self.answered_at = asyncio.get_running_loop().time()
        return reply

    async def _exchange(self, request: bytes) -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=MOST_HEADERS)
        try:
            writer.write(request)
            await writer.drain()
            return await _read_reply(reader)
        except asyncio.LimitOverrunError as error:
            raise ValueError("its headers are too long") from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read an answer. Raises ValueError when it is not HTTP or too large, EOFError when it is cut."""
    first, headers = await read_head(reader)
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first[:80]!r} is not HTTP")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(_size(headers["content-length"], 10))
    else:
        body = await reader.read(LARGEST_ANSWER + 1)
        _size(str(len(body)), 10)
    return Reply(int(rest.split(" ", 1)[0]), headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := _size((await reader.readline()).split(b";")[0].strip().decode("latin-1"), 16):
        body += await reader.readexactly(size)
        _size(str(len(body)), 10)
        await reader.readexactly(2)
    return bytes(body)


def _size(text: str, base: int) -> int:
    size = int(text, base)
    if not 0 <= size <= LARGEST_ANSWER:
        raise ValueError(f"its answer has {size} bytes; at most {LARGEST_ANSWER} are read")
    return size
