"""A process that runs one of the clients in `tests/agents/clients` or `tests/agents/typed_clients`, with
its packages."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.kit.package_environment import python_with

CLIENTS = Path(__file__).with_name("clients")
PACKAGES = (
    "openai==2.54.0",
    "anthropic==2.12.0",
    "openai-agents==0.20.0",
    "langchain-openai==1.7.3",
    "langgraph==1.2.22",
    "strands-agents[openai]==1.62.0",
    "litellm==1.106.2",
)
NAMES = sorted(path.stem for path in CLIENTS.glob("[a-z]*.py"))

TYPED_CLIENTS = Path(__file__).with_name("typed_clients")
TYPED_PACKAGES = (
    "openai==2.54.0",
    "openai-agents==0.20.0",
    "langchain-openai==1.7.3",
    "smolagents[openai]==1.26.0",
    "pydantic-ai-slim[openai]==2.31.1",
    "dspy==3.4.1",
)
TYPED_NAMES = sorted(path.stem for path in TYPED_CLIENTS.glob("typed_*.py"))
"""The clients that force the type of an answer."""


class ClientProcess:
    """The process. Attempts run in it at the same time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    async def run(self, base_url: str, api_key: str, prompt: str) -> dict[str, Any]:
        """Make one attempt, and return its answer: a `text` or an `error`."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting[api_key] = answer
        asked = {"base_url": base_url, "api_key": api_key, "prompt": prompt}
        self._input.write(json.dumps(asked).encode() + b"\n")
        async with asyncio.timeout(120):
            return await answer

    async def _read(self) -> None:
        while line := await self._output.readline():
            said = json.loads(line)
            self._waiting.pop(said["api_key"]).set_result(said)
        for answer in self._waiting.values():
            answer.set_exception(AssertionError("the process of the client has ended"))

    async def close(self) -> None:
        self._input.close()
        await self._reader


@asynccontextmanager
async def client_process(name: str) -> AsyncIterator[ClientProcess]:
    """Start the process of a client, and end it after the block."""
    process = await asyncio.create_subprocess_exec(
        python_with(TYPED_PACKAGES if name in TYPED_NAMES else PACKAGES),
        CLIENTS,
        name,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(TYPED_CLIENTS)},
    )
    client = ClientProcess(process)
    try:
        yield client
    finally:
        await client.close()
        await process.wait()
