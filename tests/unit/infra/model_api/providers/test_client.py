"""A provider's model is asked over checked addresses, again while waiting helps, and never shows its
key."""

import asyncio
from typing import Any

import pytest

from infra.model_api.providers.client import (
    MOST_BYTES,
    MOST_IN_FLIGHT,
    ProviderAway,
    ProviderClient,
    ProviderRefusal,
)
from infra.model_api.providers.endpoints import (
    PROVIDERS,
    MisdirectedKey,
    check_base_url,
    provider_ref,
)
from infra.settings.network_policy import NO_NETWORK, NetworkPolicy
from schemas.errors import InvalidConfig, TransientError
from schemas.sampling import Message, ToolCall, ToolSpec, Usage
from schemas.secrets.secret_value import SecretValue
from tests.kit.provider import FakeProvider, Reply, completion, provider, refusal

KEY = SecretValue("sk-very-secret-key-0123456789")
PROMPT = (Message(role="user", content="1+1?"),)


async def ask(fake: FakeProvider, *, network: NetworkPolicy | None = None, **more: Any) -> Any:
    client = ProviderClient(network, first_pause_s=0.001)
    try:
        ref = provider_ref("small", base_url=fake.base_url, secret="MY_KEY")
        return await client.complete(ref, PROMPT, key=KEY, **more)
    finally:
        await client.aclose()


def policy_for(fake: FakeProvider) -> NetworkPolicy:
    return NetworkPolicy.parse(f"*={check_base_url(fake.base_url)}")


def test_names_are_those_of_litellm() -> None:
    ref = provider_ref("anthropic/claude-x")
    assert (ref.model, ref.secret) == ("claude-x", "ANTHROPIC_API_KEY")
    assert ref.base_url == PROVIDERS["anthropic"].base_url
    assert provider_ref("openrouter/a/b").model == "a/b"
    own = provider_ref("a/b", base_url="http://10.0.0.5:8000/v1/")
    assert (own.model, own.base_url, own.secret) == ("a/b", "http://10.0.0.5:8000/v1", None)


@pytest.mark.parametrize("name", ["", "gpt-5", "nobody/x", "openai/", "openai/a b", "openai/a\n"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidConfig):
        provider_ref(name)


@pytest.mark.parametrize(
    "url",
    ["ftp://a/v1", "a.example.com/v1", "https://k@a/v1", "https://a/v1?k=1", "http://a:99999"],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        provider_ref("m", base_url=url)
    assert "k@" not in str(refused.value)


OPENAI = PROVIDERS["openai"].base_url


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("m", "https://models.example.com/v1"),
        ("m", "http://10.0.0.5:8000/v1"),
        ("m", "https://api.openai.com.example.com/v1"),
        ("m", "https://example.com/api.openai.com"),
        ("m", "https://api.openai.com:8443/v1"),
        ("m", "http://api.openai.com/v1"),
        ("m", PROVIDERS["anthropic"].base_url),
        ("anthropic/m", None),
    ],
)
def test_the_key_of_a_provider_goes_to_no_other_server(name: str, url: str | None) -> None:
    with pytest.raises(MisdirectedKey, match="is not sent to"):
        provider_ref(name, base_url=url, secret="OPENAI_API_KEY")
    assert provider_ref(name, base_url=url, secret="MY_KEY").secret == "MY_KEY"


@pytest.mark.parametrize("url", [None, OPENAI, f"{OPENAI}/", "https://API.openai.com:443/v2"])
def test_the_key_of_a_provider_goes_to_its_own_server(url: str | None) -> None:
    ref = provider_ref("openai/m", base_url=url, secret="OPENAI_API_KEY")
    assert ref.secret == "OPENAI_API_KEY"


async def test_an_answer_carries_its_usage_and_the_request_the_key() -> None:
    async with provider(lambda n, body: completion("2")) as fake:
        answer = await ask(fake, options={"temperature": 0.5}, network=policy_for(fake))
    assert answer.message == Message(role="assistant", content="2")
    assert answer.usage == Usage(prompt_tokens=11, completion_tokens=7)
    assert fake.bodies == [
        {
            "model": "small",
            "messages": [{"role": "user", "content": "1+1?"}],
            "temperature": 0.5,
        }
    ]
    assert fake.keys == [f"Bearer {KEY.reveal()}"]


async def test_tools_and_their_calls_go_there_and_back() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    async with provider(lambda n, body: completion("", calls=[call])) as fake:
        client = ProviderClient(None)
        ref = provider_ref("small", base_url=fake.base_url)
        tools = (ToolSpec(name="add", parameters='{"type":"object"}'),)
        first = await client.complete(ref, PROMPT, key=None, tools=tools)
        said = Message(role="tool", content="2", tool_call_id="c1")
        await client.complete(ref, (*PROMPT, first.message, said), key=None)
        await client.aclose()
    assert first.message.tool_calls == (ToolCall(id="c1", name="add", arguments='{"a":1}'),)
    assert fake.bodies[0]["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert fake.bodies[1]["messages"][1]["tool_calls"] == [call]
    assert fake.bodies[1]["messages"][2]["tool_call_id"] == "c1"
    assert fake.keys == ["", ""]


async def test_an_answer_with_lone_surrogates_can_be_stored() -> None:
    call = {"id": "\ud800", "function": {"name": "\ud800", "arguments": "\udfff"}}
    async with provider(lambda n, body: completion("a\ud800", calls=[call])) as fake:
        answer = await ask(fake)
    assert answer.message.content == "a?"
    assert b"ud800" not in answer.message.model_dump_json().encode()


async def test_only_so_many_servers_keep_their_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The addresses come from configs, and each one had a client for as long as the worker lived."""
    monkeypatch.setattr("infra.model_api.providers.client.MOST_SERVERS", 2)
    async with provider(lambda n, body: completion("2")) as fake:
        client = ProviderClient(None)
        refs = [provider_ref("small", base_url=f"{fake.base_url}/{n}") for n in range(5)]
        for ref in (*refs, *refs):
            assert (await client.complete(ref, PROMPT, key=None)).message.content == "2"
            assert len(client._servers) <= 2
        together = await asyncio.gather(*(client.complete(r, PROMPT, key=None) for r in refs))
        assert {answer.message.content for answer in together} == {"2"}
        await client.aclose()


async def test_a_key_with_a_space_is_hidden_too() -> None:
    key = SecretValue("very secret")
    async with provider(lambda n, body: refusal(401, "wrong key very secret.")) as fake:
        client = ProviderClient(None)
        ref = provider_ref("small", base_url=fake.base_url, secret="MY_KEY")
        with pytest.raises(ProviderRefusal) as refused:
            await client.complete(ref, PROMPT, key=key)
        await client.aclose()
    assert "secret." not in str(refused.value)


async def test_it_is_asked_again_while_it_limits_the_rate_or_is_away() -> None:
    def reply(number: int, body: object) -> Reply:
        if number == 0:
            return refusal(429, "slow down", retry_after_ms="5")
        return refusal(503, "away") if number == 1 else completion("2")

    async with provider(reply) as fake:
        answer = await ask(fake)
    assert answer.message.content == "2"
    assert len(fake.bodies) == 3


async def test_a_limit_that_lasts_ends_at_the_deadline_and_is_not_the_samples_fault() -> None:
    async with provider(lambda n, body: refusal(429, "slow", retry_after="30")) as fake:
        with pytest.raises(ProviderAway, match="429") as away:
            await ask(fake, deadline_s=0.2)
    assert isinstance(away.value, TransientError)
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [(401, None, "MY_KEY"), (404, None, "base URL"), (429, "insufficient_quota", "money")],
)
async def test_a_permanent_failure_is_refused_at_once(
    status: int, code: str | None, advice: str
) -> None:
    said = f"wrong key {KEY.reveal()}. or sk-very*****6789"
    async with provider(lambda n, body: refusal(status, said, code=code)) as fake:
        with pytest.raises(ProviderRefusal, match=advice) as refused:
            await ask(fake)
    assert len(fake.bodies) == 1
    assert refused.value.answered == status
    assert KEY.reveal() not in str(refused.value)
    assert "6789" not in str(refused.value)


async def test_a_redirect_is_refused_and_the_key_goes_nowhere_else() -> None:
    async with provider(lambda n, body: completion("no")) as other:
        there = {"Location": f"{other.base_url}/chat/completions"}
        async with provider(lambda n, body: (307, there, {})) as fake:
            with pytest.raises(ProviderRefusal, match="another address"):
                await ask(fake)
    assert other.bodies == []


async def test_a_parameter_that_a_model_does_not_take_is_left_out_from_then_on() -> None:
    def reply(number: int, body: Any) -> Reply:
        for name in ("temperature", "max_completion_tokens"):
            if name in body:
                return refusal(400, f"Unsupported parameter: '{name}' is not supported")
        return completion("2")

    async with provider(reply) as fake:
        client = ProviderClient(None)
        ref = provider_ref("small", base_url=fake.base_url)
        options = {"temperature": 0.0, "max_completion_tokens": 5}
        await client.complete(ref, PROMPT, key=None, options=options)
        await client.complete(ref, PROMPT, key=None, options=options)
        await client.aclose()
    assert len(fake.bodies) == 4
    assert fake.bodies[3]["max_tokens"] == 5


async def test_an_answer_that_is_none_or_too_large_is_no_crash() -> None:
    answers: tuple[object, ...] = (b"<html>", {"choices": []}, {"choices": [3]})
    async with provider(lambda n, body: (200, {}, answers[n])) as fake:
        for _ in answers:
            with pytest.raises(TransientError, match="not a chat completion"):
                await ask(fake)
    async with provider(lambda n, body: (200, {}, b" " * (MOST_BYTES + 1))) as fake:
        with pytest.raises(ProviderAway, match="bytes"):
            await ask(fake, deadline_s=1.5)


async def test_only_addresses_that_the_operator_allows_are_asked() -> None:
    async with provider(lambda n, body: completion("2")) as fake:
        with pytest.raises(InvalidConfig, match="HEADRACE_NETWORK_ALLOW"):
            await ask(fake, network=NO_NETWORK)
        address = check_base_url(fake.base_url)

        async def here(host: str, port: int) -> tuple[str, ...]:
            return ("127.0.0.1",)

        url = f"http://m.example.com:{address.port}/v1"
        ref = provider_ref("m", base_url=url)
        by_name = f"*=m.example.com:{address.port}"
        client = ProviderClient(NetworkPolicy.parse(by_name), resolve=here)
        with pytest.raises(InvalidConfig, match="not public"):
            await client.complete(ref, PROMPT, key=None)
        await client.aclose()
        client = ProviderClient(NetworkPolicy.parse(f"{by_name},{address}"), resolve=here)
        assert (await client.complete(ref, PROMPT, key=None)).message.content == "2"
        await client.aclose()


async def test_a_providers_own_server_needs_no_permission_but_a_public_address() -> None:
    async def here(host: str, port: int) -> tuple[str, ...]:
        assert host == "api.openai.com"
        return ("127.0.0.1",)

    client = ProviderClient(NO_NETWORK, resolve=here)
    with pytest.raises(InvalidConfig, match="not public"):
        await client.complete(provider_ref("openai/m"), PROMPT, key=KEY)
    await client.aclose()


async def test_a_server_gets_a_bounded_number_of_requests_at_once() -> None:
    async with provider(lambda n, body: completion("2")) as fake:
        client = ProviderClient(None)
        ref = provider_ref("small", base_url=fake.base_url)
        many = [client.complete(ref, PROMPT, key=None) for _ in range(2 * MOST_IN_FLIGHT)]
        await asyncio.gather(*many)
        await client.aclose()
    assert 1 < fake.most_at_once <= MOST_IN_FLIGHT


async def test_the_price_is_the_providers_own_or_that_of_the_tokens() -> None:
    async with provider(lambda n, body: completion("2", **({"cost": 0.5} if n else {}))) as fake:
        client = ProviderClient(None)
        ref = provider_ref("small", base_url=fake.base_url)
        priced = ref.model_copy(update={"usd_per_million": (1.0, 2.0)})
        first = await client.complete(priced, PROMPT, key=None)
        second = await client.complete(priced, PROMPT, key=None)
        await client.aclose()
    assert first.usage.usd == pytest.approx((11 + 14) / 1e6)
    assert second.usage.usd == 0.5
