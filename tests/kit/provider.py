"""A provider of models on this machine: it speaks chat completions, and answers as a test says."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Reply = tuple[int, Mapping[str, str], object]
"""Status, headers, and the body as a value of JSON (or bytes)."""


def completion(text: str, *, calls: object = None, **more: object) -> Reply:
    """An answer with this text, of 7 tokens for 11 tokens."""
    message: dict[str, object] = {"role": "assistant", "content": text}
    if calls is not None:
        message["tool_calls"] = calls
    usage = {"prompt_tokens": 11, "completion_tokens": 7, **more}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return 200, {}, {"choices": [choice], "usage": usage}


def refusal(status: int, message: str, *, code: str | None = None, **headers: str) -> Reply:
    """An error as OpenAI sends it. Underscores in the names of headers stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, {"error": {"message": message, "code": code}}


@dataclass
class FakeProvider:
    """What it was asked, and how it answers the request with a number (from 0)."""

    reply: Callable[[int, Any], Reply]
    base_url: str = ""
    bodies: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:])
                }
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                number = len(self.bodies)
                self.bodies.append(body)
                self.keys.append(headers.get("authorization", ""))
                self.paths.append(head[0].split(" ")[1])
                await asyncio.sleep(0)
                status, more, answer = self.reply(number, body)
                self._now -= 1
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}"]
                lines += [f"{name}: {value}" for name, value in more.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def provider(reply: Callable[[int, Any], Reply]) -> AsyncIterator[FakeProvider]:
    """A provider that listens at its `base_url` inside the block."""
    fake = FakeProvider(reply)
    server = await asyncio.start_server(fake.talk, "127.0.0.1", 0)
    fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        server.close()


@contextmanager
def provider_in_thread(reply: Callable[[int, Any], Reply]) -> Iterator[FakeProvider]:
    """The same in a thread of its own, for tests that wait without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    held = provider(reply)
    try:
        yield asyncio.run_coroutine_threadsafe(held.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(held.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
