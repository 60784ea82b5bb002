"""The gateway, called through the unmodified `openai` package."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from infra.model_api.gateway import sessions
from infra.model_api.gateway.server import HttpGateway
from schemas.errors import (
    CorruptData,
    FailureCategory,
    Refused,
    SamplerBusy,
    TransientError,
    UserCodeError,
)
from schemas.sampling import Message, SampleRequest, Turn
from schemas.secrets.masking import NO_MASKS, Masks
from tests.kit.sockets import relayed
from tests.kit.specs import group_spec, template


class Scripted:
    """A sampler that numbers its completions and keeps the requests that it received."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []
        self.error: Exception | None = None
        self.slow_s = 0.0

    async def prepare(self, request: SampleRequest) -> None:
        pass

    async def sample(self, request: SampleRequest) -> Turn:
        self.asked.append(request)
        number = len(self.asked)
        await asyncio.sleep(self.slow_s)
        if self.error is not None:
            raise self.error
        return Turn(
            prompt_ids=(1, 2, number),
            completion_ids=(7, 8),
            logprobs=(-0.5, -0.25),
            text=f"answer {number}",
            finish_reason="stop",
        )


RELAY: list[str] = []
"""The relay to the socket of the run that all sessions belong to."""


@pytest.fixture
def sampler() -> Scripted:
    return Scripted()


async def redeem(key: str) -> bool:
    return key == "granted"


@pytest.fixture
async def gateway(sampler: Scripted) -> AsyncIterator[HttpGateway]:
    made = HttpGateway(sampler, redeem=redeem)
    await made.start()
    async with relayed(await made.open_socket("r1")) as host:
        RELAY[:] = [host]
        yield made
    await made.aclose()


@pytest.fixture
def session(gateway: HttpGateway) -> sessions.GatewaySession:
    return gateway.open(group_spec(template()), 0, deadline_s=30)


@asynccontextmanager
async def client(
    session: sessions.GatewaySession, key: str | None = None
) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(
        base_url=f"{RELAY[0]}{session.base_path}",
        api_key=key or session.api_key,
        max_retries=0,
    )
    async with made:
        yield made


HELLO: Any = {"role": "user", "content": "hello"}


async def test_a_completion_is_answered_and_recorded_exactly(
    session: sessions.GatewaySession, sampler: Scripted
) -> None:
    async with client(session) as ai:
        answer = await ai.chat.completions.create(
            model="whatever", messages=[HELLO], max_tokens=5, temperature=0.1, logprobs=True
        )
    assert answer.choices[0].message.content == "answer 1"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)
    assert answer.choices[0].logprobs is not None
    request = sampler.asked[0]
    assert request.params.max_new_tokens == 5
    assert request.params.temperature == template().params.temperature, "the run's own wins"
    turns, conversation = session.close()
    assert turns[0].completion_ids == (7, 8)
    assert [m.content for m in conversation] == ["hello", "answer 1"]


async def test_a_stream_carries_the_text_and_the_usage(session: sessions.GatewaySession) -> None:
    async with client(session) as ai:
        stream = await ai.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "answer 1"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5


async def test_a_conversation_continues_the_turn_it_extends(
    session: sessions.GatewaySession, sampler: Scripted
) -> None:
    async with client(session) as ai:
        first = await ai.chat.completions.create(model="m", messages=[HELLO])
        said: Any = {"role": "assistant", "content": first.choices[0].message.content}
        more: Any = [HELLO, said, {"role": "user", "content": "and?"}]
        await ai.chat.completions.create(model="m", messages=more)
        await ai.chat.completions.create(model="m", messages=[HELLO])
        await ai.chat.completions.create(model="m", messages=more)
    again, fresh, repeated = sampler.asked[1:]
    assert again.history[-1].text == "answer 1"
    assert again.history_messages == (Message(role="user", content="hello"),)
    assert fresh.history_messages == ()
    asked = [request.occurrence for request in sampler.asked]
    assert asked == [0, 0, 1, 1], "asking again counts what was asked before"
    assert repeated.history[-1].text == "answer 1"


@pytest.mark.parametrize("masks", [Masks({"KEY": "hush-hush"}), NO_MASKS])
async def test_secrets_are_masked_before_anything_is_sampled_or_recorded(
    gateway: HttpGateway, sampler: Scripted, masks: Masks
) -> None:
    """The twin without masks shows that the value would be sampled from and recorded."""
    session = gateway.open(group_spec(template()), 0, deadline_s=30, masks=masks)
    leak: Any = {"role": "user", "content": "use hush-hush and aHVzaC1odXNo"}
    said: Any = {"role": "assistant", "content": "answer 1"}
    async with client(session) as ai:
        await ai.chat.completions.create(model="m", messages=[leak], stop="hush-hush")
        await ai.chat.completions.create(model="m", messages=[leak, said, HELLO])
    _, conversation = session.close()
    seen = f"{sampler.asked}{conversation}"
    assert ("hush-hush" in seen) == (not masks)
    assert ("***KEY*** and ***KEY***" in seen) == bool(masks)
    assert sampler.asked[1].history[-1].text == "answer 1", "it extends the first turn"


async def test_a_key_opens_its_own_sample_only(
    gateway: HttpGateway, session: sessions.GatewaySession
) -> None:
    other = gateway.open(group_spec(template()), 1, deadline_s=30)
    async with client(session, other.api_key) as ai:
        with pytest.raises(openai.AuthenticationError):
            await ai.chat.completions.create(model="m", messages=[HELLO])
    session.base_path += "9"
    async with client(session) as ai:
        with pytest.raises(openai.NotFoundError):
            await ai.chat.completions.create(model="m", messages=[HELLO])


async def test_time_and_budget_are_limited(
    gateway: HttpGateway,
    session: sessions.GatewaySession,
    sampler: Scripted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MOST_TURNS", 1)
    async with client(session) as ai:
        await ai.chat.completions.create(model="m", messages=[HELLO])
        with pytest.raises(openai.BadRequestError, match="at most 1 model calls"):
            await ai.chat.completions.create(model="m", messages=[HELLO])
        session.close()
        with pytest.raises(openai.APIStatusError, match="time limit of this sample has passed"):
            await ai.chat.completions.create(model="m", messages=[HELLO])
    sampler.slow_s = 5
    short = gateway.open(group_spec(template()), 2, deadline_s=0.05)
    await asyncio.sleep(0.1)
    assert short.left_s() == 0.05, "its time begins with its first request"
    async with client(short) as ai:
        with pytest.raises(openai.APIStatusError, match="time limit of this sample has passed"):
            await ai.chat.completions.create(model="m", messages=[HELLO])
    assert short.close() == ((), ())
    assert not short.interrupted, "a deadline is a fact about the sample"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [HELLO], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [HELLO], "n": 65}, "n: "),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({}, "messages"),
    ],
)
async def test_an_unknown_parameter_is_refused_by_name(
    session: sessions.GatewaySession, body: dict[str, Any], says: str
) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{RELAY[0]}{session.base_path}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {session.api_key}"},
        )
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


async def test_the_engines_refusals_have_their_status(
    session: sessions.GatewaySession, sampler: Scripted
) -> None:
    async with client(session) as ai:
        sampler.error = UserCodeError(FailureCategory.PROMPT_TOO_LONG, "99 tokens")
        with pytest.raises(openai.BadRequestError, match="99 tokens"):
            await ai.chat.completions.create(model="m", messages=[HELLO])
        for error in (Refused("another base model"), CorruptData("all are fenced")):
            sampler.error = error
            with pytest.raises(openai.BadRequestError, match=str(error)):
                await ai.chat.completions.create(model="m", messages=[HELLO])
        assert not session.interrupted, "asking again would not help"
        for away in (TransientError("the engine is gone"), SamplerBusy("it waits")):
            assert not session.waits_for_sampler
            sampler.error = away
            with pytest.raises(openai.InternalServerError):
                await ai.chat.completions.create(model="m", messages=[HELLO])
            assert session.interrupted, "the sample runs again"
    assert session.waits_for_sampler
    assert session.close()[0] == ()


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (UserCodeError(FailureCategory.PROVIDER, "no such model"), "provider_error"),
        (UserCodeError(FailureCategory.BUDGET, "advanced.max_calls"), "budget_exceeded"),
        (UserCodeError(FailureCategory.PROMPT_TOO_LONG, "99 tokens"), "prompt_too_long"),
        (Refused("another base model"), "internal_error"),
        (UserCodeError(FailureCategory.VALIDATION, "a tool call without a name"), None),
    ],
)
async def test_a_refusal_of_the_engine_is_kept_until_it_answers(
    session: sessions.GatewaySession, sampler: Scripted, error: Exception, kept: str | None
) -> None:
    async with client(session) as ai:
        sampler.error = error
        with pytest.raises(openai.BadRequestError, match=str(error)):
            await ai.chat.completions.create(model="m", messages=[HELLO])
        assert (session.refusal.category if session.refusal else None) == kept
        sampler.error = None
        await ai.chat.completions.create(model="m", messages=[HELLO])
    assert session.refusal is None


async def test_asking_many_times_at_once_draws_many_times(
    session: sessions.GatewaySession, sampler: Scripted
) -> None:
    sampler.slow_s = 0.2
    async with client(session) as ai:
        await asyncio.gather(
            *(ai.chat.completions.create(model="m", messages=[HELLO]) for _ in range(3))
        )
    assert sorted(request.occurrence for request in sampler.asked) == [0, 1, 2]
    turns, _ = session.close()
    assert [turn.text for turn in turns] == ["answer 1", "answer 2", "answer 3"]


async def test_a_chat_needs_a_key_that_was_granted(gateway: HttpGateway) -> None:
    request = SampleRequest(
        model=template().model,
        policy=template().policy,
        params=template().params,
        key=group_spec(template()).draw_key(0),
        messages=(Message(role="user", content="hi"),),
    )
    async with httpx.AsyncClient() as http:
        body = request.model_dump_json()
        wrong = await http.post(gateway.internal_url, content=body)
        right = await http.post(
            gateway.internal_url,
            content=body,
            headers={"authorization": "Bearer granted"},
        )
    assert wrong.status_code == 401
    assert Turn.model_validate_json(right.content).text == "answer 1"
