"""The cost of a turn of a workflow without the model: over TCP, over the socket, through the relay.

`python -m bench.gateway_turn [TURNS]` starts a gateway whose sampler answers at once, in a process of
its own, and asks it one turn after the other. It prints medians and 99th percentiles.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from headrace import relay
from headrace.http import post_json
from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.model_api.gateway.server import HttpGateway
from tests.kit.http_victim import Quick
from tests.kit.specs import group_spec, template

TURNS = 2000
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hello " * 100}]}
SESSIONS = 128
"""A sample may make 256 calls, so the turns are spread over this many samples."""

Turn = Callable[[str, str], Awaitable[None]]


async def serve() -> None:
    """A gateway with a socket, and the same application on a TCP port, until standard input ends."""
    gateway = HttpGateway(Quick())
    await gateway.start()
    path = await gateway.open_socket("r1")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["run"] = "r1"
        await gateway._app(scope, receive, send)

    server = HttpServer(app, host="127.0.0.1", port=0, limits=ConnectionLimits(), keep_alive_s=120)
    await server.listen()
    task = asyncio.ensure_future(server.serve())
    sessions = [gateway.open(group_spec(template()), n, deadline_s=600) for n in range(SESSIONS)]
    said = {
        "socket": str(path),
        "url": f"http://127.0.0.1:{server.port}",
        "samples": [(one.base_path, one.api_key) for one in sessions],
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.stop()
    await task
    await gateway.aclose()


async def measure(turn: Turn, samples: list[tuple[str, str]], *, turns: int) -> str:
    """The times of turns, one after the other."""
    times = []
    for number in range(turns):
        path, key = samples[number % len(samples)]
        began = time.perf_counter()
        await turn(f"{path}/chat/completions", key)
        times.append(time.perf_counter() - began)
    times.sort()
    p50, p99 = times[turns // 2], times[turns * 99 // 100]
    return f"p50 {p50 * 1000:.3f} ms   p99 {p99 * 1000:.3f} ms"


async def compare(said: dict[str, Any], turns: int) -> None:
    """Print the times of each way. Each gets samples of its own."""
    socket, url = said["socket"], said["url"]
    relayed = f"http://127.0.0.1:{relay.start(socket)}"
    async with httpx.AsyncClient() as http:

        def by_sdk(host: str, path: str | None) -> Turn:
            async def turn(where: str, key: str) -> None:
                await post_json(f"{host}{where}", BODY, key=key, socket=path)

            return turn

        def by_httpx(host: str) -> Turn:
            async def turn(where: str, key: str) -> None:
                headers = {"authorization": f"Bearer {key}"}
                (await http.post(f"{host}{where}", json=BODY, headers=headers)).raise_for_status()

            return turn

        ways = {
            "ctx.chat, TCP": by_sdk(url, None),
            "ctx.chat, socket": by_sdk(url, socket),
            "httpx, TCP": by_httpx(url),
            "httpx, relay": by_httpx(relayed),
        }
        share = SESSIONS // len(ways)
        for number, (name, turn) in enumerate(ways.items()):
            samples = said["samples"][number * share : (number + 1) * share]
            await measure(turn, samples, turns=100)
            print(f"{name:18} {await measure(turn, samples, turns=turns)}")


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
        return
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.gateway_turn", "serve"],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        asyncio.run(compare(json.loads(server.stdout.readline()), turns))
        assert server.stdin is not None
        server.stdin.close()


if __name__ == "__main__":
    main()
