"""Answers that are told while they are sampled, in every wire format."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from infra.model_api.gateway.delivery import EventStream, Pieces
from infra.model_api.gateway.provider_sampler import ProviderSampler, RoutedSampler
from infra.model_api.gateway.sessions import GatewaySession
from infra.model_api.wire import chat_completions
from infra.model_api.wire.errors import GatewayError
from schemas.errors import TransientError
from schemas.sampling import SampleRequest, Tell, TokenCounter, Turn
from tests.kit.fakes import FakeSampler, turn
from tests.kit.scripted_policy import ScriptedPolicy, open_sample, said
from tests.unit.trainer.support import request

HELLO: Any = {"role": "user", "content": "hello"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
ANSWER = said("I add it.", add='{"a": 17}')


@dataclass
class Telling(ScriptedPolicy):
    """Tells the first two pieces of its answer, and goes on once `heard` is set."""

    heard: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False

    async def stream(self, request: SampleRequest, tell: Tell) -> Turn:
        for piece in ("I ", "add"):
            tell(piece)
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(60):
                await self.heard.wait()
        finally:
            self.left.set()
        if self.fails:
            raise TransientError("the engine is gone")
        return await self.sample(request)


@asynccontextmanager
async def client(
    policy: ScriptedPolicy,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, GatewaySession]]:
    async with (
        open_sample(policy) as (url, session),
        openai.AsyncOpenAI(base_url=url, api_key=session.api_key, max_retries=0) as made,
    ):
        yield made, session


async def test_chat_completions_are_told_while_they_are_sampled() -> None:
    policy = Telling([ANSWER])
    text, calls, usage = "", "", None
    async with client(policy) as (ai, session):
        stream = await ai.chat.completions.create(
            model="m",
            messages=[HELLO],
            tools=[ADD],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    calls += call.function.arguments or "" if call.function else ""
            if text == "I add":
                assert session.calls[0].turn is None
                policy.heard.set()
    assert (text, calls) == ("I add it.", '{"a": 17}')
    assert usage is not None
    assert usage.completion_tokens == len(session.close()[0][0].completion_ids)


async def test_responses_are_told_while_they_are_sampled() -> None:
    policy, text, last = Telling([ANSWER]), "", None
    async with client(policy) as (ai, _):
        async for event in await ai.responses.create(model="m", input="hello", stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
            if text == "I add":
                policy.heard.set()
            last = event
    assert text == "I add it."
    assert last is not None
    assert last.type == "response.completed"
    assert last.response.output_text == "I add it."
    assert last.response.usage is not None


async def test_messages_are_told_while_they_are_sampled() -> None:
    policy, text, events = Telling([ANSWER]), "", list[Any]()
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO], "stream": True}
    async with open_sample(policy) as (url, session), httpx.AsyncClient() as http:
        headers = {"x-api-key": session.api_key}
        async with http.stream("POST", f"{url}/v1/messages", json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                events.append(json.loads(line[6:]))
                text += events[-1].get("delta", {}).get("text", "")
                if text == "I add":
                    policy.heard.set()
    assert text == "I add it."
    assert events[-2]["usage"]["output_tokens"] > 0
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_choices_are_told_apart() -> None:
    policy = Telling([said("I add one."), said("I add two.")])
    policy.heard.set()
    texts = ["", ""]
    async with client(policy) as (ai, _):
        stream = await ai.chat.completions.create(model="m", messages=[HELLO], n=2, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert sorted(texts) == ["I add one.", "I add two."]


async def test_a_client_that_closes_its_stream_ends_the_sampling() -> None:
    policy = Telling([ANSWER])
    async with client(policy) as (ai, session):
        stream = await ai.chat.completions.create(model="m", messages=[HELLO], stream=True)
        async for _chunk in stream:
            await stream.close()
            break
        async with asyncio.timeout(60):
            await policy.left.wait()
            while not session.calls[0].refused:
                await asyncio.sleep(0.01)
    assert session.close()[0] == ()
    assert not session.interrupted


async def test_an_error_after_the_first_piece_is_an_event() -> None:
    policy = Telling([ANSWER], fails=True)
    async with client(policy) as (ai, session):
        stream = await ai.chat.completions.create(model="m", messages=[HELLO], stream=True)
        policy.heard.set()
        with pytest.raises(openai.APIError, match="the engine is gone"):
            async for _chunk in stream:
                pass
    assert session.interrupted
    assert session.close()[0] == ()


async def test_pieces_for_a_slow_client_are_joined() -> None:
    """A client that does not read holds no more than the answer, in one piece."""
    pieces, sent, reads = Pieces(), list[bytes](), asyncio.Event()
    is_over = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        await reads.wait()

    async def work() -> tuple[Turn, ...]:
        for _ in range(1000):
            pieces.add(0, "x")
            await asyncio.sleep(0)
        is_over.set()
        return (turn("x" * 1000 + "y"),)

    parsed = chat_completions.parse(json.dumps({"messages": [HELLO], "stream": True}).encode())
    stream = EventStream(send, parsed.stream(number=1))
    delivering = asyncio.ensure_future(stream.deliver(work(), pieces, asyncio.Event().wait))  # type: ignore[arg-type]  # waits for ever
    async with asyncio.timeout(60):
        await is_over.wait()
        assert len(sent) == 1
        reads.set()
        await delivering
    chunks = [json.loads(event[6:]) for event in sent if event.startswith(b"data: {")]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert "".join(filter(None, texts)) == "x" * 1000 + "y"
    assert len(texts) < 8


async def test_the_workers_sampler_streams_and_counts() -> None:
    """What the worker's gateway has in front of an engine does not hide what the engine can do."""
    engine = Telling([said("I add")])
    engine.heard.set()
    provider = ProviderSampler.__new__(ProviderSampler)
    routed, told = RoutedSampler(engine, provider), list[str]()
    await routed.stream(request(), told.append)
    assert told == ["I ", "add"]
    assert isinstance(routed, TokenCounter)
    with pytest.raises(GatewayError, match="does not count tokens"):
        await routed.count_prompt_tokens(request())
    plain = RoutedSampler(FakeSampler(lambda _: turn("one")), provider)
    assert (await plain.stream(request(), told.append)).text == "one"
    assert told == ["I ", "add"]
