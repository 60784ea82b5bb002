"""The Responses API, through the unmodified `openai` package."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from infra.model_api.gateway.sessions import GatewaySession
from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.responses_request import InputItem, messages_of
from schemas.sampling import sequences_of
from tests.kit.scripted_policy import ScriptedPolicy, open_sample, said

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": True,
}


@asynccontextmanager
async def client(
    policy: ScriptedPolicy,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, GatewaySession]]:
    async with (
        open_sample(policy) as (url, session),
        openai.AsyncOpenAI(base_url=url, api_key=session.api_key, max_retries=0) as made,
    ):
        yield made, session


async def test_items_that_are_sent_back_continue_the_turn() -> None:
    first = said("I add.", reasoning="hm", add='{"a": 17}', sub="{}")
    policy = ScriptedPolicy([first, said("42")])
    async with client(policy) as (ai, session):
        items: Any = [{"role": "user", "content": "17 + 25?"}]
        answer = await ai.responses.create(
            model="m", instructions="Be brief.", input=items, tools=[ADD], store=False
        )
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert answer.output_text == "I add."
        assert answer.usage is not None
        assert answer.status == "completed"
        for item in answer.output:
            if item.type == "reasoning":
                continue
            items.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                assert item.call_id
        for item in answer.output:
            if item.type == "function_call":
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
                )
        last = await ai.responses.create(
            model="m", instructions="Be brief.", input=items, tools=[ADD]
        )
        assert last.output_text == "42"
    turns, conversation = session.close()
    roles = [message.role for message in conversation]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert conversation[2].reasoning == "hm"
    assert len(sequences_of(turns)) == 1


async def test_a_response_continues_an_earlier_one_of_its_sample() -> None:
    policy = ScriptedPolicy([said("one"), said("two")])
    async with client(policy) as (ai, session):
        first = await ai.responses.create(model="m", instructions="A.", input="hello")
        await ai.responses.create(
            model="m", instructions="B.", input="more", previous_response_id=first.id
        )
        for unknown in ("resp_9", "resp_0", "other"):
            with pytest.raises(openai.BadRequestError, match="no such response"):
                await ai.responses.create(model="m", input="x", previous_response_id=unknown)
    _, conversation = session.close()
    assert [m.content for m in conversation] == ["B.", "hello", "one", "more", "two"]


async def test_a_stream_sends_the_events_of_each_item_in_order() -> None:
    policy = ScriptedPolicy([said("I add.", reasoning="hm", add='{"a": 17}')])
    async with client(policy) as (ai, _):
        stream = await ai.responses.create(model="m", input="hello", tools=[ADD], stream=True)
        events = [event async for event in stream]
        async with ai.responses.stream(model="m", input="hello", tools=[ADD]) as helper:
            async for _event in helper:
                pass
            final = await helper.get_final_response()
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "I add."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with client(ScriptedPolicy([said("one")], finish="length")) as (ai, _):
        answer = await ai.responses.create(model="m", input="hello", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    ],
)
async def test_an_unsupported_parameter_is_refused_by_name(options: Any, names: str) -> None:
    async with client(ScriptedPolicy([said("one")])) as (ai, session):
        with pytest.raises(openai.BadRequestError) as raised:
            await ai.responses.create(**{"model": "m", "input": "hello", **options})
        assert raised.value.param == names
        assert session.calls == []


def items(*written: dict[str, Any]) -> list[InputItem]:
    return [InputItem.model_validate(item) for item in written]


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    heard = {"type": "function_call_output", "call_id": "c", "output": "42"}
    one = {"role": "assistant", "content": "one"}
    two = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "two"}],
    }
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    messages = messages_of(items(thought, one, call, call, heard, two, one, thought, call))
    assert [(m.role, m.content, len(m.tool_calls), m.reasoning) for m in messages] == [
        ("assistant", "one", 2, "hm"),
        ("tool", "42", 0, None),
        ("assistant", "two", 0, None),
        ("assistant", "one", 0, None),
        ("assistant", "", 1, "hm"),
    ]
    with pytest.raises(GatewayError, match="name of its function"):
        messages_of(items({"type": "function_call"}))
