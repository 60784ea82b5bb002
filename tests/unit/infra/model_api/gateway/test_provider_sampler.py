"""A workflow is evaluated on a provider's model through the same gateway, within bounds on requests and
money, and never sees the key."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from consumers.rollout.sampling import entry_of, record_of
from infra.model_api.gateway.provider_sampler import ProviderSampler, RoutedSampler, stored_keys
from infra.model_api.gateway.server import HttpGateway
from infra.model_api.provider_usage import MemoryProviderUsage
from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.endpoints import provider_ref
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ModelRef, ProviderRef, SampleRequest
from schemas.secrets.secret_value import SecretValue
from tests.kit.fakes import FakeSampler, turn
from tests.kit.provider import FakeProvider, completion, provider, refusal
from tests.kit.sockets import relayed
from tests.kit.specs import group_spec, template

KEY = SecretValue("sk-very-secret-key-0123456789")
PROMPT: list[Any] = [{"role": "user", "content": "1+1?"}]


async def find_key(ref: ProviderRef) -> SecretValue | None:
    return KEY if ref.secret else None


def model_of(fake: FakeProvider, **more: object) -> ModelRef:
    ref = provider_ref("small", base_url=fake.base_url, secret="MY_KEY")
    ref = ref.model_copy(update={"timeout_s": 0.3, **more})
    return ModelRef(kind="provider", name=ref.name, provider=ref)


def sample_request(model: ModelRef | None = None) -> SampleRequest:
    shape = template()
    if model is not None:
        shape = shape.model_copy(update={"model": model})
    return SampleRequest(
        model=shape.model,
        policy=shape.policy,
        params=shape.params,
        key=group_spec(shape).draw_key(0),
        messages=(Message(role="user", content="1+1?"),),
    )


@asynccontextmanager
async def sampler_of() -> AsyncIterator[ProviderSampler]:
    client = ProviderClient(None, first_pause_s=0.001)
    yield ProviderSampler(client, find_key, MemoryProviderUsage())
    await client.aclose()


async def test_a_client_of_openai_reaches_the_providers_model_by_the_gateway() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}

    def reply(number: int, body: Any) -> Any:
        return completion("", calls=[call], cost=0.5) if number == 0 else completion("2", cost=0.25)

    async with provider(reply) as fake, sampler_of() as sampler:
        gateway = HttpGateway(RoutedSampler(FakeSampler(lambda _: turn("no")), sampler))
        await gateway.start()
        try:
            async with relayed(await gateway.open_socket("r1")) as host:
                shape = template().model_copy(update={"model": model_of(fake)})
                session = gateway.open(group_spec(shape), 0, deadline_s=30)
                client = openai.AsyncOpenAI(
                    base_url=host + session.base_path, api_key=session.api_key, max_retries=0
                )
                first = await client.chat.completions.create(model="x", messages=PROMPT)
                assert first.usage is not None
                assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (11, 7)
                await client.chat.completions.create(
                    model="x",
                    messages=[*PROMPT, {"role": "assistant", "content": "?"}, *PROMPT],
                    max_tokens=3,
                )
                await client.close()
                turns, messages = session.close()
        finally:
            await gateway.aclose()
    assert fake.bodies[1]["max_tokens"] == 3
    assert {*fake.keys} == {f"Bearer {KEY.reveal()}"}
    record = record_of(0, turns, messages, failure=None)
    assert record.sequences == ()
    assert (record.prompt_tokens, record.completion_tokens, record.usd) == (22, 14, 0.75)
    assert entry_of(record).usd == 0.75
    assert turns[0].message.tool_calls[0].name == "add"
    assert KEY.reveal() not in record.model_dump_json()


@pytest.mark.parametrize(
    ("constraint", "sent"),
    [
        (
            Constraint(calls=("add",)),
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        (Constraint(calls=("add", "sub")), {"tool_choice": "required"}),
        (
            Constraint(json_schema='{"type": "object"}', calls=("add",)),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
    ],
)
async def test_a_forced_answer_is_forced_by_the_provider(
    constraint: Constraint, sent: dict[str, object]
) -> None:
    async with provider(lambda n, body: completion("2")) as fake, sampler_of() as sampler:
        asked = sample_request(model_of(fake)).model_copy(update={"constraint": constraint})
        await sampler.sample(asked)
        await sampler.sample(sample_request(model_of(fake)))
    forced, free = (
        {key: body[key] for key in ("tool_choice", "response_format") if key in body}
        for body in fake.bodies
    )
    assert (forced, free) == (sent, {})


async def test_an_engine_samples_all_other_models() -> None:
    async with sampler_of() as sampler:
        engine = FakeSampler(lambda _: turn("yes"))
        routed = RoutedSampler(engine, sampler)
        request = sample_request()
        await routed.prepare(request)
        answer = await routed.sample(request)
    assert answer.usage is None
    assert engine.requests == [request]


@pytest.mark.parametrize(
    ("bounds", "calls"),
    [({"max_calls": 2}, 2), ({"max_usd": 0.05, "usd_per_million": (0.0, 5000.0)}, 2)],
)
async def test_requests_and_money_are_bounded_for_each_owner(
    bounds: Mapping[str, object], calls: int
) -> None:
    async with provider(lambda n, body: completion("2")) as fake, sampler_of() as sampler:
        request = sample_request(model=model_of(fake, owner="e1", **bounds))
        for _ in range(calls):
            await sampler.sample(request)
        with pytest.raises(UserCodeError, match=r"advanced\.max_") as refused:
            await sampler.sample(request)
        other = sample_request(model=model_of(fake, owner="e2", **bounds))
        await sampler.sample(other)
    assert refused.value.category == FailureCategory.BUDGET
    assert len(fake.bodies) == calls + 1


@pytest.mark.parametrize(
    ("status", "message", "category"),
    [
        (401, "bad key", FailureCategory.PROVIDER),
        (400, "maximum context length is 8", FailureCategory.PROMPT_TOO_LONG),
    ],
)
async def test_a_refusal_of_the_provider_fails_the_sample(
    status: int, message: str, category: FailureCategory
) -> None:
    async with provider(lambda n, body: refusal(status, message)) as fake, sampler_of() as sampler:
        with pytest.raises(UserCodeError, match=message) as failed:
            await sampler.sample(sample_request(model=model_of(fake)))
    assert failed.value.category == category


async def test_a_provider_that_is_away_is_no_failure_of_the_sample() -> None:
    async with provider(lambda n, body: refusal(500, "oh")) as fake, sampler_of() as sampler:
        with pytest.raises(TransientError):
            await sampler.sample(sample_request(model=model_of(fake)))


class OneSecret:
    """A store with one secret, of one workspace."""

    async def resolve(
        self, names: Sequence[str], *, workspace: str | None, submitter: str | None
    ) -> Mapping[str, SecretValue]:
        return {name: KEY for name in names if workspace == "w1"}


async def test_the_key_is_that_of_the_workspace() -> None:
    find = stored_keys(OneSecret())  # type: ignore[arg-type]  # only `resolve` is used
    ref = provider_ref("openai/m").model_copy(update={"workspace": "w1"})
    assert await find(ref) == KEY
    assert await find(ref.model_copy(update={"secret": None})) is None
    with pytest.raises(UserCodeError, match="headrace secret set OPENAI_API_KEY"):
        await find(ref.model_copy(update={"workspace": "w2"}))
