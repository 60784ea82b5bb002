"""Agents on Chat Completions: tools, calls, results, choices, streams, limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from infra.model_api.gateway.sessions import GatewaySession
from schemas.sampling import Message, sequences_of
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.specs import GroupSpec
from tests.kit.scripted_policy import ScriptedPolicy, open_sample, said
from tests.kit.specs import group_spec, template

HELLO: Any = {"role": "user", "content": "17 + 25?"}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}


@asynccontextmanager
async def client(
    policy: ScriptedPolicy, *, spec: GroupSpec | None = None, masks: Masks = NO_MASKS
) -> AsyncIterator[tuple[openai.AsyncOpenAI, GatewaySession]]:
    async with (
        open_sample(policy, spec=spec, masks=masks) as (url, session),
        openai.AsyncOpenAI(base_url=url, api_key=session.api_key, max_retries=0) as made,
    ):
        yield made, session


async def test_a_call_its_result_and_the_next_turn_are_one_training_row() -> None:
    policy = ScriptedPolicy([said(reasoning="hm", add='{"a": 17}', sub="{}"), said("42")])
    async with client(policy) as (ai, session):
        first = await ai.chat.completions.create(
            model="m", messages=[HELLO], tools=[ADD], parallel_tool_calls=True, store=False, seed=1
        )
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        calls: Any = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["add", "sub"]
        assert calls[0].function.arguments == '{"a": 17}'
        answered = choice.message.model_dump(exclude_none=True)
        answered.pop("reasoning_content")
        answered["tool_calls"][0]["function"]["arguments"] = '{"a":17}'
        heard: Any = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in calls]
        more: Any = [HELLO, answered, *heard]
        last = await ai.chat.completions.create(model="m", messages=more, tools=[ADD])
    assert last.choices[0].message.content == "42"
    assert policy.asked[0].tools[0].name == "add"
    turns, conversation = session.close()
    assert session.tools == policy.asked[0].tools
    assert [message.role for message in conversation] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert conversation[1].reasoning == "hm", "the recorded answer, not the one that was resent"
    (row,) = sequences_of(turns)
    sampled = [t for t, m in zip(row.tokens, row.loss_mask, strict=True) if m]
    assert sampled == [token for turn in turns for token in turn.completion_ids]


async def test_a_conversation_that_no_request_continues_is_a_branch() -> None:
    policy = ScriptedPolicy([said("one"), said("two"), said("three"), said("four")])
    async with client(policy) as (ai, session):
        both = await ai.chat.completions.create(model="m", messages=[HELLO], n=2)
        first: Any = [HELLO, both.choices[0].message.model_dump(exclude_none=True)]
        more: Any = [*first, {"role": "user", "content": "And now?"}]
        await ai.chat.completions.create(model="m", messages=more)
        other: Any = {"role": "user", "content": "A question of a sub-agent"}
        await ai.chat.completions.create(model="m", messages=[other])
    _, conversation = session.close()
    spoken = [[message.content for message in branch] for branch in session.branches]
    assert spoken == [
        ["17 + 25?", "two"],
        ["17 + 25?", "one", "And now?", "three"],
        ["A question of a sub-agent", "four"],
    ]
    assert session.branches[-1] == conversation


async def test_calls_have_unique_ids_in_a_sample() -> None:
    policy = ScriptedPolicy([said(add="{}")])
    async with client(policy) as (ai, session):
        ids = []
        for _ in range(3):
            answer = await ai.chat.completions.create(model="m", messages=[HELLO], tools=[ADD])
            assert answer.choices[0].message.tool_calls
            ids.append(answer.choices[0].message.tool_calls[0].id)
    assert len(set(ids)) == 3
    recorded = [turn.message.tool_calls[0].id for turn in session.close()[0]]
    assert recorded == ids


async def test_a_stream_carries_tool_calls_and_the_usage() -> None:
    policy = ScriptedPolicy([said("I add.", reasoning="hm", add='{"a": 1}', sub="{}")])
    async with (
        client(policy) as (ai, _),
        ai.chat.completions.stream(
            model="m", messages=[HELLO], tools=[ADD], stream_options={"include_usage": True}
        ) as stream,
    ):
        async for _event in stream:
            pass
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.tool_calls
    assert [c.function.name for c in choice.message.tool_calls] == ["add", "sub"]
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert final.usage is not None


async def test_several_choices_are_several_branches() -> None:
    policy = ScriptedPolicy([said("one"), said("two"), said("three"), said("four")])
    async with client(policy) as (ai, session):
        answer = await ai.chat.completions.create(model="m", messages=[HELLO], n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        said_by = {choice.message.content for choice in answer.choices}
        assert said_by == {"one", "two", "three"}
        second: Any = {"role": "assistant", "content": answer.choices[1].message.content}
        await ai.chat.completions.create(model="m", messages=[HELLO, second, HELLO])
    assert [request.occurrence for request in policy.asked[:3]] == [0, 1, 2]
    turns, _ = session.close()
    rows = sequences_of(turns)
    assert len(rows) == 3, "the second branch was continued"
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(t.completion_ids) for t in turns)


async def test_a_rewritten_history_starts_a_new_row() -> None:
    policy = ScriptedPolicy([said("one"), said("two")])
    async with client(policy) as (ai, session):
        await ai.chat.completions.create(model="m", messages=[HELLO])
        edited: Any = [HELLO, {"role": "assistant", "content": "edited"}, HELLO]
        await ai.chat.completions.create(model="m", messages=edited)
    assert policy.asked[1].history_messages == ()
    assert len(sequences_of(session.close()[0])) == 2


async def test_without_a_choice_of_tools_none_are_offered() -> None:
    policy = ScriptedPolicy([said("one")])
    async with client(policy) as (ai, session):
        for choice in ("none", "auto"):
            await ai.chat.completions.create(
                model="m", messages=[HELLO], tools=[ADD], tool_choice=choice
            )
        session.close()
    assert [len(request.tools) for request in policy.asked] == [0, 1]
    assert session.offered == ((), session.tools)


SECRET = "hush-hush-hush"
LEAKS: Any = [
    {"role": "user", "content": SECRET},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": SECRET,
        "tool_calls": [
            {"id": SECRET, "type": "function", "function": {"name": SECRET, "arguments": SECRET}}
        ],
    },
    {"role": "tool", "tool_call_id": SECRET, "content": SECRET, "name": SECRET},
]


@pytest.mark.parametrize("masks", [Masks({"KEY": SECRET}), NO_MASKS])
async def test_secrets_are_masked_everywhere(masks: Masks) -> None:
    """The twin without masks shows that each place would be sampled from."""
    schema = {"description": SECRET, "enum": [SECRET, 1], SECRET: {"default": SECRET}}
    tool: Any = {
        "type": "function",
        "function": {"name": SECRET, "description": SECRET, "parameters": schema},
    }
    policy = ScriptedPolicy([said("one")])
    async with client(policy, masks=masks) as (ai, _):
        await ai.chat.completions.create(model="m", messages=LEAKS, tools=[tool])
    seen = policy.asked[0].model_dump_json()
    assert (SECRET in seen) == (not masks)
    assert seen.count("***KEY***") == (14 if masks else 0)


def limited(**limits: int) -> GroupSpec:
    made = template()
    assert made.rollout is not None
    rollout = made.rollout.model_copy(update=limits)
    return group_spec(made.model_copy(update={"rollout": rollout}))


async def test_the_turns_of_a_sample_are_limited() -> None:
    async with client(ScriptedPolicy([said("one")]), spec=limited(max_turns=3)) as (ai, session):
        await ai.chat.completions.create(model="m", messages=[HELLO], n=2)
        with pytest.raises(openai.BadRequestError, match=r"2 of at most 3 turns") as raised:
            await ai.chat.completions.create(model="m", messages=[HELLO], n=2)
        assert raised.value.code == "max_turns_exceeded"
        await ai.chat.completions.create(model="m", messages=[HELLO])
    assert len(session.close()[0]) == 3
    assert not session.interrupted


async def test_the_tokens_of_a_sample_are_limited() -> None:
    one = said("one")
    used = len(Message(role="user", content="17 + 25?").model_dump_json()) + len(
        one.model_dump_json()
    )
    policy = ScriptedPolicy([one])
    async with client(policy, spec=limited(max_sample_tokens=used + 10)) as (ai, session):
        await ai.chat.completions.create(model="m", messages=[HELLO])
        assert session.num_tokens == used
        answered: Any = {"role": "assistant", "content": "one"}
        await ai.chat.completions.create(model="m", messages=[HELLO, answered, HELLO])
        assert policy.asked[1].params.max_new_tokens == 10
        with pytest.raises(openai.BadRequestError, match="max_sample_tokens") as raised:
            await ai.chat.completions.create(model="m", messages=[HELLO])
        assert raised.value.code == "max_sample_tokens_exceeded"
        spent = session.num_tokens
    assert spent == sum(len(row.tokens) for row in sequences_of(session.close()[0]))


async def test_the_answers_of_a_sample_are_limited_together() -> None:
    one = said("one")
    length = len(one.model_dump_json())
    policy = ScriptedPolicy([one], slow_s=0.2)
    async with client(policy, spec=limited(max_response_tokens=2 * length + 3)) as (ai, session):
        for _ in range(2):
            await ai.chat.completions.create(model="m", messages=[HELLO], max_tokens=5000)
        await asyncio.gather(
            *(ai.chat.completions.create(model="m", messages=[HELLO]) for _ in range(2))
        )
        given = [request.params.max_new_tokens for request in policy.asked]
        unlimited = min(5000, template().params.max_new_tokens)
        wanted = [2 * length + 3, length + 3, 3, 3]
        assert given == [min(unlimited, one) for one in wanted]
        told = r"end the attempt with what it has, raise max_response_length, or lower max_answer"
        with pytest.raises(openai.BadRequestError, match=told) as raised:
            await ai.chat.completions.create(model="m", messages=[HELLO])
        assert raised.value.code == "max_response_length_exceeded"
    assert not session.interrupted


async def test_an_answer_that_nobody_waits_for_is_not_recorded() -> None:
    policy = ScriptedPolicy([said("one")], slow_s=30)
    async with client(policy) as (ai, session):
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                await ai.with_options(timeout=0.2).chat.completions.create(
                    model="m", messages=[HELLO], stream=stream
                )
        async with asyncio.timeout(10):
            while not all(call.refused for call in session.calls):
                await asyncio.sleep(0.01)
    assert session.close()[0] == ()
    assert not session.interrupted


async def test_a_stream_that_says_nothing_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.model_api.gateway.delivery.KEEP_ALIVE_S", 0.05)
    async with client(ScriptedPolicy([said("one")], slow_s=0.3)) as (ai, _):
        stream = await ai.chat.completions.create(model="m", messages=[HELLO], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "one"


async def test_the_models_are_the_policy() -> None:
    async with client(ScriptedPolicy([said("one")])) as (ai, _):
        assert [model.id async for model in ai.models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError):
            await ai.with_options(api_key="wrong").models.list()
