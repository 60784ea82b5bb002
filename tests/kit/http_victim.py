"""A gateway in a process of its own, for tests of what hostile clients can take from it.

`python -m tests.kit.http_victim [naive-bodies|asyncio-listener|full]`: prints its socket, and the key
and path of a sample, as JSON, then answers each line of its standard input with its figures.
"""

import asyncio
import json
import logging
import os
import resource
import sys

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from infra.model_api.gateway.server import HttpGateway
from schemas.sampling import SampleRequest, Turn
from tests.kit.specs import group_spec, template

OTHERS = 4
"""The number of sockets of other runs."""

FILES = 128
"""Files that the process may open where they are made scarce."""


class Quick:
    """A sampler that always returns the same turn."""

    async def sample(self, request: SampleRequest) -> Turn:
        return Turn(
            prompt_ids=(1,),
            completion_ids=(2,),
            logprobs=(-1.0,),
            text="here",
            finish_reason="stop",
        )

    async def prepare(self, request: SampleRequest) -> None:
        return None


class Lines(logging.Handler):
    """Counts log records."""

    num = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1


class Naive(HttpGateway):
    """Reads each body before it checks the key."""

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)

        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await super()._app(scope, receive_whole, send)


def peak_kb(status: int) -> int:
    """The most memory that this program has held, from its open /proc/self/status. getrusage would tell
    the parent's peak, where that was higher."""
    text = os.pread(status, 8192, 0).decode()
    return int(text.partition("VmHWM:")[2].split()[0])


async def main(kind: str) -> None:
    """Serve until standard input ends."""
    lines = Lines()
    logging.basicConfig(handlers=[lines], level=logging.INFO)
    gateway = (Naive if kind == "naive-bodies" else HttpGateway)(Quick())
    await gateway.start()
    session = gateway.open(group_spec(template()), 0, deadline_s=600)
    plain = None
    address: str | int = str(await gateway.open_socket(session.spec.owner))
    others = [str(await gateway.open_socket(f"other-{n}")) for n in range(OTHERS)]
    if kind == "asyncio-listener":
        config = uvicorn.Config(gateway._app, port=0, log_config=None, backlog=4096, lifespan="off")
        server = uvicorn.Server(config)
        plain = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()[1]
    held: list[int] = []
    loop = asyncio.get_running_loop()
    said = {"path": session.base_path, "key": session.api_key, "address": address, "others": others}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    status = os.open("/proc/self/status", os.O_RDONLY)  # at the limit of files it is too late
    while asked := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if asked == "fill":
            resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
            held = fill_descriptors()
        if asked == "free":
            for each in held[: len(held) // 2]:
                os.close(each)
        cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        figures = {"peak_kb": peak_kb(status), "lines": lines.num, "cpu_s": cpu_s}
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
    if plain is not None:
        plain.cancel()


def fill_descriptors() -> list[int]:
    """As many files as there may be."""
    found = []
    while True:
        try:
            found.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return found


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
