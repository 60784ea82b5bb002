"""The unmodified `openai` package against the gateway and the built-in engine: each parameter is
applied, or refused by name."""

import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from infra.model_api.gateway.server import HttpGateway
from infra.model_api.gateway.sessions import GatewaySession
from infra.model_api.wire.request import MOST_STOPS
from schemas.models.scratch import scratch_shape
from schemas.sampling import PolicyRef, SamplingParams
from tests.kit.sockets import relayed
from tests.kit.specs import group_spec, template
from trainer.engine import Engine
from trainer.model.char_tokenizer import character_tokenizer
from trainer.model.token_bytes import TokenBytes

HELLO: Any = [{"role": "user", "content": "hello"}]


RELAY: list[str] = []
"""The relay to the socket of the run that the session belongs to."""


@pytest.fixture
async def session(engine: Engine) -> AsyncIterator[GatewaySession]:
    gateway = HttpGateway(engine.sampler)
    await gateway.start()
    async with relayed(await gateway.open_socket("r1")) as host:
        RELAY[:] = [host]
        params = SamplingParams(max_new_tokens=24, deterministic=True, seed=3)
        policy = PolicyRef(version=0)
        spec = group_spec(template().model_copy(update={"params": params, "policy": policy}))
        yield gateway.open(spec, 0, deadline_s=600)
    await gateway.aclose()


@pytest.fixture
async def ai(session: GatewaySession) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{RELAY[0]}{session.base_path}",
        api_key=session.api_key,
        max_retries=0,
    ) as made:
        yield made


async def ask(ai: openai.AsyncOpenAI, session: GatewaySession, **options: Any) -> Any:
    """The first answer of a sample that has received no request before."""
    session.calls.clear()
    return (await ai.chat.completions.create(model="m", messages=HELLO, **options)).choices[0]


@pytest.mark.parametrize("shape", ["text", "list"])
async def test_an_answer_ends_before_the_first_stop_string(
    ai: openai.AsyncOpenAI, session: GatewaySession, shape: str
) -> None:
    free = (await ask(ai, session)).message.content
    stop = free[3:5]
    stopped = await ask(ai, session, stop=stop if shape == "text" else ["never said", stop])
    assert stopped.message.content == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"
    turns, _ = session.close()
    assert len(turns[0].completion_ids) < len(free), "what was not said was not sampled either"
    assert turns[0].pieces is None


async def test_choices_are_draws_of_their_own_and_a_seed_changes_none(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    """The draws belong to the run, so the same request draws the same, whatever seed it names."""
    texts = []
    for options in ({}, {"seed": 7}, {"seed": 8, "temperature": 0.1, "top_p": 0.5}):
        session.calls.clear()
        answer: Any = await ai.chat.completions.create(
            model="another-models-name", messages=HELLO, n=3, **options
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts.append([choice.message.content for choice in answer.choices])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 3
    assert answer.usage.completion_tokens == sum(
        len(call.turn.completion_ids) for call in session.calls if call.turn
    )


async def test_logprobs_are_of_the_tokens_of_the_text(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    choice = await ask(ai, session, logprobs=True)
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == choice.message.content
    assert all(token.logprob < 0 and token.top_logprobs == [] for token in tokens)
    stop = choice.message.content[3:5]
    cut = await ask(ai, session, logprobs=True, stop=stop)
    assert "".join(token.token for token in cut.logprobs.content) == cut.message.content
    assert (await ask(ai, session)).logprobs is None


async def test_a_stream_has_them_too(ai: openai.AsyncOpenAI, session: GatewaySession) -> None:
    stream: Any = await ai.chat.completions.create(
        model="m", messages=HELLO, logprobs=True, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    text = "".join(choice.delta.content or "" for choice in choices)
    tokens = [t for c in choices if c.logprobs for t in c.logprobs.content or ()]
    assert "".join(token.token for token in tokens) == text


async def test_the_likeliest_tokens_are_told_and_change_nothing(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    plain = await ask(ai, session, logprobs=True)
    session.calls.clear()
    choice = await ask(ai, session, logprobs=True, top_logprobs=20)
    assert choice.message.content == plain.message.content
    tokens = choice.logprobs.content
    assert [t.logprob for t in tokens] == [t.logprob for t in plain.logprobs.content]
    for token in tokens:
        likely = [other.logprob for other in token.top_logprobs]
        assert len(likely) == 20
        assert likely == sorted(likely, reverse=True)
        assert 0 < sum(map(math.exp, likely)) <= 1 + 1e-6
        same = [other.logprob for other in token.top_logprobs if other.bytes == token.bytes]
        assert not same or token.logprob in same
    assert any(t.bytes == other.bytes for t in tokens for other in t.top_logprobs)


async def test_the_likeliest_tokens_agree_with_what_was_drawn(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    """The pass that finds them gives a drawn token the logprob that it was drawn with."""
    await ask(ai, session, logprobs=True, top_logprobs=20)
    (call,) = session.calls
    assert call.turn is not None
    assert call.turn.likeliest is not None
    greatest = [place[0].logprob for place in call.turn.likeliest]
    assert all(own <= top + 1e-6 for own, top in zip(call.turn.logprobs, greatest, strict=True))


async def test_the_likeliest_tokens_need_logprobs(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    for options in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError, match="logprobs") as raised:
            await ask(ai, session, **options)
        assert raised.value.param == "top_logprobs"
    assert session.calls == []
    none = await ask(ai, session, logprobs=True, top_logprobs=0)
    assert all(token.top_logprobs == [] for token in none.logprobs.content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "xml"}),
        ("tool_choice", "sometimes"),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
    ],
)
async def test_an_unsupported_parameter_is_refused_by_name(
    ai: openai.AsyncOpenAI, session: GatewaySession, name: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(ai, session, **{name: value})
    error = raised.value
    assert (error.param, error.code, error.type) == (
        name,
        "unsupported_parameter",
        "invalid_request_error",
    )
    assert error.message.count(name) >= 1
    assert "leave it out" in error.message or "use " in error.message or "ask for" in error.message
    assert session.calls == [], "nothing was sampled"


async def test_an_unknown_parameter_is_refused_by_name(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(ai, session, extra_body={"best_of": 5})
    assert (raised.value.param, raised.value.code) == ("best_of", "unknown_parameter")
    said = [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        await ai.chat.completions.create(model="m", messages=said)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("stop", "says"), [(["a"] * (MOST_STOPS + 1), "at most 4"), ("", "at least 1"), ([""], "1")]
)
async def test_stop_strings_are_up_to_four_and_not_empty(
    ai: openai.AsyncOpenAI, session: GatewaySession, stop: object, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as raised:
        await ask(ai, session, stop=stop)
    assert raised.value.param == "stop"


async def test_parameters_without_effect_are_accepted(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    """Parameters that clients send by default, and their own messages sent back."""
    first = await ask(
        ai,
        session,
        response_format={"type": "text"},
        frequency_penalty=0,
        user="me",
        seed=None,
        stop=None,
        tools=[],
        n=1,
    )
    again = [*HELLO, first.message.model_dump(), {"role": "user", "content": "more", "name": "x"}]
    assert (await ai.chat.completions.create(model="m", messages=again)).choices


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(symbols)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return fast(made)


def byte_fallback() -> PreTrainedTokenizerFast:
    symbols = [*(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "▁ab"]
    made = Tokenizer(
        models.BPE({s: n for n, s in enumerate(symbols)}, [], byte_fallback=True, fuse_unk=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast(made)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_parts_of_characters_are_bytes(make: Any) -> None:
    tokenizer = make()
    text = "ab 語é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = TokenBytes(tokenizer).of([*ids, tokenizer.eos_token_id], text)
    assert pieces[-1] is None, "what ends the turn is no text"
    assert b"".join(bytes(p) for p in pieces if p is not None).decode() == text
    assert sum(p is not None and len(p) == 1 and p[0] > 127 for p in pieces) == 5


def test_text_after_a_stop_string_has_no_piece() -> None:
    tokenizer = character_tokenizer(scratch_shape("qwen3-tiny"))
    ids = tokenizer.encode("abcSTOP", add_special_tokens=False)
    pieces = TokenBytes(tokenizer).of(ids, "abc")
    assert [p is None for p in pieces] == [False] * 3 + [True] * 4
    assert TokenBytes(tokenizer).of(ids, "") == (None,) * 7
