"""Environments are served by the protocol, and their model calls find their sample."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from headrace.servers.attempts import AttemptFailed, ServerGrade
from headrace.servers.dialects import capacity_of, find_dialect
from headrace.servers.leases import LeasedRollouts
from headrace.servers.loopback import Loopback, ServerAway
from headrace.servers.program import free_port
from headrace.servers.serving import RolloutFailed, RolloutServer, task_of
from headrace.servers.session_router import SessionRouter
from tests.unit.headrace.servers.scripted import ATTEMPT, Answer, scripted


@asynccontextmanager
async def serving(make: Callable[[Any], Awaitable[float]]) -> AsyncIterator[Loopback]:
    """A client of a server around `make`."""
    port = free_port()
    task = asyncio.ensure_future(RolloutServer(make, capacity=3).serve(port))
    client = Loopback(port)
    async with asyncio.timeout(30):
        while not await _listens(client):
            await asyncio.sleep(0.001)
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _listens(client: Loopback) -> bool:
    try:
        return (await client.request("GET", "/health", timeout_s=5)).status == 200
    except ServerAway:
        return False


async def test_a_function_is_served_as_the_current_generation() -> None:
    async def make(request: Any) -> float:
        await asyncio.sleep(0)
        return float(request["label"])

    async with serving(make) as server:
        assert await find_dialect(server) == "leases"
        assert await capacity_of(server) == 3
        assert await LeasedRollouts(server).make(ATTEMPT) == ServerGrade(4.0)


@pytest.mark.parametrize(
    ("error", "category", "why"),
    [
        (RolloutFailed("no task"), "raised", "no task"),
        (KeyError("x"), "raised", "KeyError: 'x'"),
        (None, "timeout", "not finished after 0.02 s"),
    ],
)
async def test_a_rollout_that_fails_says_why(
    error: Exception | None, category: str, why: str
) -> None:
    async def make(request: Any) -> float:
        if error is not None:
            raise error
        await asyncio.sleep(3600)
        return 0.0

    attempt = replace(ATTEMPT, agent_timeout_s=0.01, grader_timeout_s=0.01)
    async with serving(make) as server:
        with pytest.raises(AttemptFailed, match=why) as raised:
            await LeasedRollouts(server).make(attempt)
    assert raised.value.category == category


async def test_a_cancelled_rollout_ends() -> None:
    ended = asyncio.Event()

    async def make(request: Any) -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return 0.0

    async with serving(make) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await LeasedRollouts(server).make(ATTEMPT)
        async with asyncio.timeout(30):
            await ended.wait()


@pytest.mark.parametrize(
    ("metadata", "task"),
    [
        ({"task": 3}, 3),
        ({"task": '{"a": 1}'}, {"a": 1}),
        ({"task": {"a": 1}}, {"a": 1}),
        (None, None),
    ],
)
def test_a_row_names_its_task(metadata: object, task: object) -> None:
    assert task_of({"metadata": metadata}) == task


async def test_requests_go_to_the_sample_that_their_header_names() -> None:
    async def script(asked: str, body: Any) -> Answer:
        return 200, [asked, body]

    async with scripted(script) as upstream:
        router = SessionRouter("X-Session-ID")
        port = int((await router.start()).removesuffix("/v1").rpartition(":")[2])
        url = f"http://127.0.0.1:{upstream.port}/v1/samples/one"
        router.route("s1", url=url, key="key")
        client = Loopback(port)

        async def ask(session: str) -> int:
            reply = await client.request(
                "POST",
                "/v1/chat/completions",
                body={"a": 1},
                headers={"x-session-id": session, "authorization": "Bearer other"},
                timeout_s=5,
            )
            if reply.status == 200:
                assert reply.body == b'["POST /v1/samples/one/chat/completions", {"a": 1}]'
            return reply.status

        assert await ask("s1") == 200
        assert await ask("s2") == 404
        router.forget("s1")
        assert await ask("s1") == 404
        router.close()
