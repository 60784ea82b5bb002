"""The gateway of the process that serves: only known keys are answered, and answers, tools, counts and
errors have OpenAI's form."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from infra.model_api.gateway.bytes_in_flight import BytesInFlight
from infra.model_api.gateway.server import HttpGateway
from infra.model_api.serving.answer_memory import AnswerMemory
from infra.model_api.serving.call import PATH, ServingCall, WireName
from infra.model_api.serving.sessions import DeploymentSessions, deployment_gateway
from infra.model_api.wire import completions
from schemas.deployments import ServedModel
from schemas.errors import NotFound, TransientError
from schemas.sampling import (
    Message,
    ModelRef,
    PolicyRef,
    SampleRequest,
    Tell,
    ToolCall,
    Turn,
)

KEY = "hrs-known"
SERVED = ServedModel(
    name="sums",
    base_name="tiny",
    model=ModelRef(kind="scratch", name="tiny"),
    policy=PolicyRef(version=3),
    lora_alpha=16,
    run="r1",
    run_name="calm-otter",
    step=3,
)
CHAT: dict[str, Any] = {"model": "tiny:sums", "messages": [{"role": "user", "content": "1+1"}]}


@dataclass
class Scripted:
    """An engine that answers with the same turn, and remembers what it was asked."""

    error: Exception | None = None
    calls: tuple[ToolCall, ...] = ()
    asked: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Turn:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        message = Message(role="assistant", content="two", tool_calls=self.calls)
        return Turn(
            prompt_ids=(1, 2, 3),
            completion_ids=(4, 5),
            logprobs=(-0.5, -0.5),
            text="two",
            answer=message,
            finish_reason="stop",
        )

    async def stream(self, request: SampleRequest, tell: Tell) -> Turn:
        tell("t")
        tell("w")
        return await self.sample(request)

    async def prepare(self, request: SampleRequest) -> None: ...


@dataclass
class Counted:
    """Counts that are only remembered."""

    uses: list[tuple[str, str, int, int]] = field(default_factory=list)

    def add(self, api_key: str, model: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        self.uses.append((api_key, model, prompt_tokens, completion_tokens))


@dataclass
class Served:
    sessions: DeploymentSessions
    gateway: HttpGateway
    engine: Scripted
    counted: Counted
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return self.gateway.url + PATH

    async def ask(
        self,
        body: dict[str, Any] = CHAT,
        *,
        wire: WireName = "chat",
        is_base: bool = False,
        key: str = KEY,
        asker: str = "t1",
    ) -> httpx.Response:
        call = ServingCall(api_key=asker, wire=wire, served=SERVED, is_base=is_base)
        return await self.client.post(
            self.url,
            content=call.pack(json.dumps(body).encode()),
            headers={"Authorization": f"Bearer {key}"},
        )


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async def is_known(key: str) -> bool:
        return key == KEY

    engine, counted = Scripted(), Counted()
    sessions = DeploymentSessions(is_known=is_known, usage=counted)
    gateway = deployment_gateway(engine, sessions)
    await gateway.start()
    sessions.is_ready = True
    async with httpx.AsyncClient() as client:
        yield Served(sessions, gateway, engine, counted, client)
    await gateway.aclose()


async def test_an_answer_has_the_deployment_that_the_call_names(served: Served) -> None:
    answer = (await served.ask()).json()
    assert answer["choices"][0]["message"]["content"] == "two"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert served.counted.uses == [("t1", "tiny:sums", 3, 2)]
    [asked] = served.engine.asked
    assert asked.policy.version == 3
    assert asked.lora_alpha == 16
    await served.ask(is_base=True)
    assert served.engine.asked[1].policy == PolicyRef(version=0)
    assert served.counted.uses[1][1] == "tiny"


async def test_temperature_top_p_and_seed_are_obeyed(served: Served) -> None:
    drawn = {"temperature": 0.3, "top_p": 0.9, "seed": 7, "max_tokens": 5, "stop": "x"}
    await served.ask({**CHAT, **drawn})
    params = served.engine.asked[0].params
    assert (params.temperature, params.top_p, params.seed) == (0.3, 0.9, 7)
    assert (params.max_new_tokens, params.stop) == (5, ("x",))
    await served.ask({**CHAT, "seed": 7})
    assert served.engine.asked[1].key == served.engine.asked[0].key
    await served.ask()
    await served.ask()
    assert served.engine.asked[2].key != served.engine.asked[3].key, "each draw is another one"


@pytest.mark.parametrize(
    "changes", [{"top_k": 4}, {"min_p": 0.1}, {"seed": "x"}, {"response_format": {"type": "json"}}]
)
async def test_a_parameter_that_is_not_obeyed_is_refused_by_name(
    served: Served, changes: dict[str, Any]
) -> None:
    refused = await served.ask({**CHAT, **changes})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(changes))
    assert served.counted.uses == []


async def test_a_format_is_obeyed(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert (await served.ask({**CHAT, "response_format": form})).status_code == 200
    constraint = served.engine.asked[0].constraint
    assert constraint is not None
    assert json.loads(constraint.json_schema or "") == schema


async def test_tool_calls_come_with_ids_of_their_own(served: Served) -> None:
    served.engine.calls = (
        ToolCall(id="", name="add", arguments='{"a": 1}'),
        ToolCall(id="", name="add", arguments="{}"),
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = (await served.ask({**CHAT, "tools": tools})).json()
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in calls} - {""}) == 2
    assert served.engine.asked[0].tools[0].name == "add"


async def test_a_stream_tells_the_text_and_is_counted(served: Served) -> None:
    answer = await served.ask({**CHAT, "stream": True, "n": 2})
    assert answer.headers["content-type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    for choice in (0, 1):
        told = [p["delta"].get("content", "") for p in pieces if p["index"] == choice]
        assert "".join(told) == "two"
    assert served.counted.uses == [("t1", "tiny:sums", 3, 4)]


async def test_texts_are_continued_without_a_template(served: Served) -> None:
    body = {"model": "tiny:sums", "prompt": ["a", "b"], "n": 2, "max_tokens": 4}
    answer = (await served.ask(body, wire="completions")).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.prompt for request in served.engine.asked] == ["a", "a", "b", "b"]
    assert answer["usage"]["prompt_tokens"] == 6
    await served.ask({"model": "m", "prompt": [5, 6]}, wire="completions")
    assert served.engine.asked[-1].prompt == (5, 6)
    await served.ask({"model": "m", "prompt": ["a", "b", "a"]}, wire="completions")
    assert [request.occurrence for request in served.engine.asked[-3:]] == [0, 0, 1]
    assert served.engine.asked[-1].params.max_new_tokens == 16


def test_the_tokens_of_a_long_text_are_written_in_linear_time() -> None:
    """Whatever writes an answer keeps the process from all other answers meanwhile."""
    num = 20_000
    turn = Turn(
        prompt_ids=(1,),
        completion_ids=(2,) * num,
        logprobs=(-0.5,) * num,
        text="ab" * num,
        finish_reason="length",
        pieces=((97, 98),) * num,
    )
    asked = completions.parse(json.dumps({"prompt": "a", "logprobs": 0}).encode())
    began = time.thread_time()
    answer = json.loads(asked.answer([turn], number=1))
    assert time.thread_time() - began < 3, "with time for each pair of tokens it takes 20 s"
    offsets = answer["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [2 * number for number in range(num)]


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotFound("artifact x does not exist any more"), 410), (TransientError("vLLM is away"), 503)],
)
async def test_an_engine_that_cannot_answer_says_why(
    served: Served, error: Exception, status: int
) -> None:
    served.engine.error = error
    refused = await served.ask()
    assert refused.status_code == status
    assert str(error) in refused.json()["error"]["message"]
    assert served.counted.uses == []


async def test_a_stranger_is_refused_and_a_known_key_is_not(served: Served) -> None:
    assert (await served.ask(key="hrs-other")).status_code == 401
    assert served.engine.asked == []
    assert (await served.ask()).status_code == 200  # the twin


async def test_the_gateway_of_deployments_answers_nothing_else(served: Served) -> None:
    """It may listen on a network, where no chat and no sample must be reachable."""
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in ("/internal/sample", "/v1/samples/r1.0.0.0.0/chat/completions"):
        url = served.url.replace(PATH, path)
        refused = await served.client.post(url, json=CHAT, headers=headers)
        assert refused.status_code == 404
        assert f"only POST {PATH} exists" in refused.text
    with pytest.raises(AssertionError):
        await served.gateway.open_socket("r1")
    assert served.engine.asked == []


async def test_a_key_whose_calls_are_too_large_together_is_refused(served: Served) -> None:
    """Also when several control processes ask, each with its own count."""
    served.sessions._in_flight = BytesInFlight(of_key=300_000)
    may_answer, answer_now = asyncio.Event(), served.engine.sample

    async def sample(request: SampleRequest) -> Turn:
        await may_answer.wait()
        return await answer_now(request)

    served.engine.sample = sample  # type: ignore[method-assign]  # it waits
    large = {"model": "m", "messages": [{"role": "user", "content": "a" * 200_000}]}
    asked = [asyncio.ensure_future(served.ask(large)) for _ in range(2)]
    first, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    assert [one.result().status_code for one in first] == [429]
    assert first.pop().result().headers["retry-after"] == "1"
    may_answer.set()
    assert sorted([one.status_code for one in await asyncio.gather(*asked)]) == [200, 429]
    assert (await served.ask(large)).status_code == 200


class CountedMemory(AnswerMemory):
    """Counts the calls that have asked for memory."""

    num_asked = 0

    async def wait_for_room(self, most: dict[str, int], num_bytes: int) -> None:
        self.num_asked += 1
        await super().wait_for_room(most, num_bytes)


async def test_answers_that_nobody_reads_hold_up_their_own_key_alone(served: Served) -> None:
    """A client that does not read keeps its answers in memory, here by not letting them end."""
    memory = served.sessions._memory = CountedMemory(of_key=100_000)
    samples, may_answer, answer_now = asyncio.Event(), asyncio.Event(), served.engine.sample

    async def sample(request: SampleRequest) -> Turn:
        samples.set()
        await may_answer.wait()
        return await answer_now(request)

    served.engine.sample = sample  # type: ignore[method-assign]  # it waits
    likely = {**CHAT, "logprobs": True, "top_logprobs": 1, "max_tokens": 100}
    asked = [asyncio.ensure_future(served.ask(likely)) for _ in range(4)]
    async with asyncio.timeout(60):
        while memory.num_asked < 4:
            await asyncio.sleep(0.01)
        await samples.wait()
    served.engine.sample = answer_now  # type: ignore[method-assign]  # it answers at once
    assert (await served.ask(likely, asker="t2")).status_code == 200
    assert len(served.engine.asked) == 1
    asked.pop().cancel()  # one that waits leaves
    may_answer.set()
    assert {one.status_code for one in await asyncio.gather(*asked)} == {200}
    assert len(served.engine.asked) == 4
    assert not served.sessions._memory._held


async def test_answers_that_can_never_fit_are_refused(served: Served) -> None:
    wanted = {**CHAT, "n": 64, "logprobs": True, "top_logprobs": 20}
    refused = await served.ask({**wanted, "max_tokens": 4096})
    assert refused.status_code == 400
    assert "fewer max_tokens" in refused.json()["error"]["message"]
    assert served.engine.asked == []
    assert (await served.ask({**wanted, "max_tokens": 16})).status_code == 200  # the twin


async def test_a_temperature_that_no_logit_can_be_divided_by_is_a_small_one(
    served: Served,
) -> None:
    await served.ask({**CHAT, "temperature": 1e-320})
    await served.ask({**CHAT, "temperature": 0})
    assert [one.params.temperature for one in served.engine.asked] == [1e-6, 0]


async def test_calls_are_refused_until_the_deployments_are_loaded(served: Served) -> None:
    served.sessions.is_ready = False
    assert (await served.ask()).status_code == 503
    served.sessions.is_ready = True
    assert (await served.ask()).status_code == 200


async def test_while_keys_cannot_be_looked_up_a_call_is_to_be_repeated() -> None:
    async def is_known(key: str) -> bool:
        raise TransientError("the database does not answer now")

    sessions = DeploymentSessions(is_known=is_known, usage=Counted())
    gateway = deployment_gateway(Scripted(), sessions)
    await gateway.start()
    sessions.is_ready = True
    async with httpx.AsyncClient() as client:
        assert (await client.post(gateway.url + PATH, content=b"{}\n{}")).status_code == 503
    await gateway.aclose()
