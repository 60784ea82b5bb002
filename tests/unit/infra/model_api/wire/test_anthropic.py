"""Anthropic's Messages API, as its clients call it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from infra.model_api.gateway.sessions import GatewaySession
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.sampling import SampleRequest, sequences_of
from tests.kit.scripted_policy import ScriptedPolicy, open_sample, said

QUESTION = {"role": "user", "content": "17 + 25?"}
ASK: Any = {"model": "m", "max_tokens": 64, "messages": [QUESTION]}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


class Counting(ScriptedPolicy):
    """A policy that can say how long a prompt is."""

    async def count_prompt_tokens(self, request: SampleRequest) -> int:
        return len(request.messages) + len(request.tools)


class Client:
    """Sends requests with the headers of Anthropic's clients."""

    def __init__(self, http: httpx.AsyncClient, url: str, session: GatewaySession) -> None:
        self.http, self.url, self.session = http, url, session
        self.headers = {"x-api-key": session.api_key, "anthropic-version": "2023-06-01"}

    async def post(self, body: Any, path: str = "/v1/messages") -> httpx.Response:
        return await self.http.post(f"{self.url}{path}", json=body, headers=self.headers)


@asynccontextmanager
async def client(policy: ScriptedPolicy) -> AsyncIterator[Client]:
    async with open_sample(policy) as (url, session), httpx.AsyncClient() as http:
        yield Client(http, url, session)


async def test_blocks_that_are_sent_back_continue_the_turn() -> None:
    first = said("I add.", reasoning="hm", add='{"a": 17}', broken="no {json")
    policy = ScriptedPolicy([first, said("42")])
    async with client(policy) as ai:
        body = {**ASK, "system": [{"type": "text", "text": "Be brief."}], "tools": [ADD]}
        answer = (await ai.post(body)).json()
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert answer["stop_reason"] == "tool_use"
        assert answer["content"][2]["input"] == {"a": 17}
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "42"}
            for block in answer["content"][2:]
        ]
        results[1]["content"] = [{"type": "text", "text": "43"}]
        more = [
            QUESTION,
            {"role": "assistant", "content": answer["content"][1:]},
            {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
        ]
        last = (await ai.post({**body, "messages": more}, "/messages")).json()
        assert last["content"] == [{"type": "text", "text": "42"}]
        assert last["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
    turns, conversation = ai.session.close()
    assert [message.role for message in conversation] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "assistant",
    ]
    assert conversation[2].tool_calls[1].arguments == "no {json"
    assert len(sequences_of(turns)) == 1


async def test_a_stream_sends_the_events_of_each_block_in_order() -> None:
    policy = ScriptedPolicy([said("I add.", reasoning="hm", add='{"a": 17}')])
    async with client(policy) as ai:
        text = (await ai.post({**ASK, "stream": True, "tools": [ADD]})).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert [e["delta"]["type"] for e in events if "delta" in e and "type" in e["delta"]] == [
        "thinking_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_tokens_are_counted_without_a_turn() -> None:
    async with client(Counting([said("one")])) as ai:
        body = {"model": "m", "messages": ASK["messages"], "tools": [ADD], "system": "Be brief."}
        answer = await ai.post(body, "/v1/messages/count_tokens")
        assert answer.json() == {"input_tokens": 3}
        assert ai.session.calls == []
    async with client(ScriptedPolicy([said("one")])) as ai:
        answer = await ai.post(body, "/v1/messages/count_tokens")
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"best_of": 3}, "best_of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "x"}]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ],
)
async def test_an_unsupported_parameter_is_refused_by_name(changes: Any, says: str) -> None:
    async with client(ScriptedPolicy([said("one")])) as ai:
        answer = await ai.post({**ASK, **changes})
        assert answer.status_code == 400
        error = answer.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert says in error["error"]["message"]
        assert ai.session.calls == []


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UserCodeError(FailureCategory.PROMPT_TOO_LONG, "99 tokens"), 400, "invalid_request_error"),
        (TransientError("the engine is gone"), 503, "api_error"),
    ],
)
async def test_errors_have_anthropics_form(error: Exception, status: int, kind: str) -> None:
    async with client(ScriptedPolicy([said("one")], error=error)) as ai:
        for stream in (False, True):
            answer = await ai.post({**ASK, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        ai.headers["x-api-key"] = "wrong"
        assert (await ai.post(ASK)).json()["error"]["type"] == "authentication_error"


async def test_defaults_of_clients_are_accepted() -> None:
    options = {
        "tools": [],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "temperature": 1.0,
        "top_k": 5,
        "metadata": {"user_id": "me"},
        "stop_sequences": ["x"],
    }
    policy = ScriptedPolicy([said("one")])
    async with client(policy) as ai:
        assert (await ai.post({**ASK, **options})).status_code == 200
    assert policy.asked[0].params.stop == ("x",)
