"""The gateway under load: what it adds to a turn, and what samples in flight keep in memory.

`python -m bench.gateway_load [IN_FLIGHT]` starts a gateway in a process of its own, whose engine answers
after 100 to 300 ms with a call of a tool. IN_FLIGHT samples (64) hold conversations of six turns, over
the socket, as the SDK does. It prints how much longer than the engine a turn took in the gateway, from
the head of the request to the end of the answer. Then 1,000 samples that have had four turns of 256
tokens, and have another under way, are held, and the memory of the process is compared with that before.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from headrace.http import post_json
from infra.model_api.gateway.bodies import Receive, Scope
from infra.model_api.gateway.delivery import Send
from infra.model_api.gateway.server import HttpGateway
from schemas.sampling import Message, SampleRequest, ToolCall, Turn
from tests.kit.specs import group_spec, template

IN_FLIGHT, TURNS, ROUNDS = 64, 6, 8
HELD, HELD_TURNS, TOKENS = 1000, 4, 256
PROMPT = {"role": "user", "content": "What is seventeen plus twenty-five? " * 30}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


in_engine: ContextVar[list[float]] = ContextVar("in_engine")
"""The seconds that the current request has spent in the engine."""


class TimedGateway(HttpGateway):
    """Notes how long each request took without its engine."""

    def __init__(self, engine: "TimedEngine") -> None:
        super().__init__(engine)
        self.added: list[float] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        spent: list[float] = []
        in_engine.set(spent)
        began = time.perf_counter()
        await super()._app(scope, receive, send)
        self.added.append(time.perf_counter() - began - sum(spent))


class TimedEngine:
    """`schemas.sampling.Sampler` that takes a while, and continues exact ids as an engine does."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.ids = [self.random.randrange(150_000) for _ in range(1 << 16)]
        self.logprobs = tuple(-self.random.random() for _ in range(TOKENS))
        self.is_held = False
        self.num_open = 0

    async def prepare(self, request: SampleRequest) -> None:
        pass

    def _some_ids(self) -> tuple[int, ...]:
        """Ids that were drawn before, because an engine draws them on a thread of its own. Where memory
        is measured, each turn has its own, as those of an engine."""
        if self.is_held:
            return tuple(self.random.randrange(150_000) for _ in range(TOKENS))
        begin = self.random.randrange(len(self.ids) - TOKENS)
        return tuple(self.ids[begin : begin + TOKENS])

    async def sample(self, request: SampleRequest) -> Turn:
        began = time.perf_counter()
        last = request.history[-1] if request.history_messages else None
        before = (*last.prompt_ids, *last.completion_ids) if last else ()
        ids, new = self._some_ids(), self._some_ids()
        call = ToolCall(id="c", name="add", arguments='{"a": 17, "b": 25}')
        turn = Turn(
            prompt_ids=(*before, *new),
            completion_ids=ids,
            logprobs=tuple(-p for p in self.logprobs) if self.is_held else self.logprobs,
            text="I add them. " * 20,
            finish_reason="stop",
            answer=Message(role="assistant", content="I add them. " * 20, tool_calls=(call,)),
        )
        answered = sum(message.role == "assistant" for message in request.messages)
        if self.is_held and answered == HELD_TURNS:
            self.num_open += 1
            await asyncio.sleep(3600)
        if not self.is_held:
            await asyncio.sleep(self.random.uniform(0.1, 0.3))
        in_engine.get().append(time.perf_counter() - began)
        return turn


async def serve() -> None:
    """Answer each line of standard input, until it ends: with samples, or with figures."""
    engine = TimedEngine()
    gateway = TimedGateway(engine)
    await gateway.start()
    path = await gateway.open_socket("r1")
    loop = asyncio.get_running_loop()
    number = 0
    while asked := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if asked[0] == "figures":
            said: Any = {
                "added": gateway.added,
                "kb": _resident_kb(),
                "cpu_s": time.process_time(),
            }
            gateway.added = []
        elif asked[0] == "open":
            said = engine.num_open
        else:
            engine.is_held = asked[0] == "held"
            numbers = range(number, number + int(asked[1]))
            opened = [gateway.open(group_spec(template()), n, deadline_s=3600) for n in numbers]
            number = numbers.stop
            said = [(str(path), one.base_path, one.api_key) for one in opened]
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def _resident_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


class Server:
    """The process with the gateway."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.gateway_load", "serve"],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


async def converse(sample: tuple[str, str, str], *, turns: int) -> None:
    """Hold a conversation."""
    socket, path, key = sample
    messages: list[Any] = [PROMPT]
    for _ in range(turns):
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        answer: Any = await post_json(
            f"http://x{path}/chat/completions", body, key=key, socket=socket
        )
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call, "content": "42"}]


async def measure(server: Server, in_flight: int) -> None:
    """Print what the gateway adds to a turn, and what samples in flight keep."""
    cpu_s = server.ask("figures")["cpu_s"]
    for _ in range(ROUNDS):
        samples = server.ask(f"timed {in_flight}")
        await asyncio.gather(*(converse(one, turns=TURNS) for one in samples))
    figures = server.ask("figures")
    added = sorted(figures["added"])
    num = len(added)
    for name, place in (("p50", num // 2), ("p90", num * 9 // 10), ("p99", num * 99 // 100)):
        print(f"added to a turn, {name}: {added[place] * 1000:.2f} ms")
    print(f"{num} turns, {(figures['cpu_s'] - cpu_s) / num * 1000:.2f} ms of CPU each")
    before = server.ask("figures")["kb"]
    samples = server.ask(f"held {HELD}")
    tasks = [asyncio.ensure_future(converse(one, turns=HELD_TURNS + 1)) for one in samples]
    while int(server.ask("open")) < HELD:
        done, _ = await asyncio.wait(tasks, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        assert not done, f"{len(done)} samples ended before all were held: {done.pop()}"
    after = server.ask("figures")["kb"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(f"{HELD} samples in flight: {(after - before) / 1024:.0f} MiB more")


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
        return
    server = Server()
    with server.process:
        asyncio.run(measure(server, int(sys.argv[1]) if len(sys.argv) > 1 else IN_FLIGHT))
        assert server.process.stdin is not None
        server.process.stdin.close()


if __name__ == "__main__":
    main()
