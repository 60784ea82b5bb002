"""Tools in chats: how they are written, how calls are found, and that sampled ids stay as they are."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import UserCodeError
from schemas.sampling import Message, SampleRequest, ToolCall, ToolSpec, Turn, sequences_of
from tests.kit.property_examples import examples
from tests.unit.trainer.support import TINY, request
from trainer.model.base import build_base
from trainer.model.chat_template import Chat
from trainer.model.tool_calls import (
    FoundCall,
    as_message,
    split_marked,
    split_reasoning,
    split_tagged,
    template_message,
)

ADD = ToolSpec(
    name="add",
    description="Adds.",
    parameters=json.dumps({"type": "object", "properties": {"a": {}, "b": {}}}),
)
END = 6
TAGGED = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWRITING = TAGGED.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")


def chat_of(template: str | None = None) -> Chat:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    if template is not None:
        base.tokenizer.chat_template = template
    return Chat(base.tokenizer, base.stop_ids)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return chat_of()


@pytest.fixture(scope="module")
def tagged() -> Chat:
    return chat_of(TAGGED)


USER = Message(role="user", content="1+2?")


def test_our_template_names_tools_and_their_parameters(chat: Chat) -> None:
    written = chat.text([USER], tools=[ADD], reply_next=True)
    assert written == "<|system|>add(a, b)<|end|><|user|>1+2?<|end|><|assistant|>"
    assert chat.text([USER], reply_next=True) == "<|user|>1+2?<|end|><|assistant|>"


def test_calls_of_our_template_are_found_and_written_alike(chat: Chat) -> None:
    ids = chat.encode('so<|tool|>add{"a": 1}<|tool|>nothing<|end|>')
    answer = chat.answer(ids, chat.decode(ids), prompt_ids=[], tools=[ADD])
    assert answer == Message(
        role="assistant",
        content="so",
        tool_calls=(
            ToolCall(id="call_0", name="add", arguments='{"a": 1}'),
            ToolCall(id="call_1", name="nothing", arguments=""),
        ),
    )
    assert 'so<|tool|>add{"a": 1}<|tool|>nothing<|end|>' in chat.text([answer], reply_next=False)


def test_without_tools_an_answer_is_its_text(chat: Chat) -> None:
    ids = chat.encode("so<|tool|>add{}<|end|>")
    assert chat.answer(ids, chat.decode(ids), prompt_ids=[], tools=[]) is None


def test_a_template_of_a_model_gets_arguments_as_an_object(tagged: Chat) -> None:
    call = ToolCall(id="x", name="add", arguments='{"a":1}')
    asked = Message(role="assistant", content="", tool_calls=(call,))
    text = tagged.text([USER, asked], tools=[ADD], reply_next=False)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert '"description": "Adds."' in text


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ('<tool_call>{"name": "a", "arguments": {}}</tool_call>', "", ["a"]),
        ('x <tool_call>\n{"name": "a"}\n</tool_call> <tool_call>{"name": "b"}', "x", ["a", "b"]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        ("<tool_call>" + "[" * 9000, "<tool_call>" + "[" * 9000, []),
        ("plain ", "plain ", []),
    ],
)
def test_tagged_calls_are_split_from_the_text(text: str, content: str, names: list[str]) -> None:
    found, calls = split_tagged(text)
    assert (found, [call.name for call in calls]) == (content, names)


def test_a_call_with_a_lone_surrogate_can_be_stored_and_rendered() -> None:
    text = '<tool_call>{"name": "a\\ud800", "arguments": {"x": "\\udfff"}}</tool_call>'
    content, calls = split_tagged(text)
    message = as_message(content, calls, reasoning=None)
    assert b'"a?"' in message.model_dump_json().encode()
    raw = as_message("", [FoundCall("a", '{"x": "\\udfff"}')], reasoning=None)
    for each in (message, raw):
        json.dumps(template_message(each, is_ours=False), ensure_ascii=False).encode()


def test_there_are_at_most_128_calls() -> None:
    assert len(split_marked("<|tool|>a{}" * 500)[1]) == 128
    assert len(split_tagged('<tool_call>{"name": "a"}</tool_call>' * 500)[1]) == 128


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm\n</think>\n\nso", False, ("hm", "so")),
        ("hm</think>so", True, ("hm", "so")),
        ("<think>hm", False, ("hm", "")),
        ("so <think>no</think>", False, (None, "so <think>no</think>")),
    ],
)
def test_reasoning_is_split_from_the_answer(
    text: str, *, is_open: bool, expected: tuple[str | None, str]
) -> None:
    assert split_reasoning(text, is_open=is_open) == expected


def test_a_template_without_tools_refuses_them() -> None:
    with pytest.raises(UserCodeError, match="has no tools"):
        chat_of("{{ messages[0].content }}").text([USER], tools=[ADD], reply_next=True)


def sample(chat: Chat, asked: SampleRequest, ids: tuple[int, ...]) -> Turn:
    """A turn as an engine makes it, with these ids in place of drawn ones."""
    prompt = tuple(chat.prompt_ids(asked))
    text = chat.decode(ids)
    answer = chat.answer(ids, text, prompt_ids=prompt, tools=asked.tools)
    return Turn(
        prompt_ids=prompt,
        completion_ids=ids,
        logprobs=tuple(-float(i) for i in ids),
        text=answer.content if answer else text,
        answer=answer,
        finish_reason="stop" if ids[-1:] == (END,) else "length",
    )


WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ['<|tool|>add{"a": 1}', '<tool_call>{"name": "add"}</tool_call>', "<|end|>", "é\u2028", ""]
    ),
)


@pytest.mark.parametrize("template", [None, TAGGED, REWRITING])
@examples(60)
@given(data=st.data())
def test_each_sampled_id_is_trained_once_and_nothing_else(
    template: str | None, data: st.DataObject
) -> None:
    chat = CHATS.setdefault(template, chat_of(template))
    tools = (ADD,) if data.draw(st.booleans()) else ()
    turns: list[Turn] = []
    talks: list[tuple[tuple[Message, ...], Turn | None]] = [((USER,), None)]
    for _ in range(data.draw(st.integers(1, 5))):
        before, last = data.draw(st.sampled_from(talks))
        others = [turn for turn in turns if turn is not last]
        history = (*others, last) if last is not None else tuple(others)
        spoken = before if last is None else before[:-1]
        messages = before
        if last is not None:
            role = data.draw(st.sampled_from(["user", "tool"]))
            said = Message.model_validate({"role": role, "content": data.draw(st.text(max_size=6))})
            messages = (*spoken, last.message, said)
        asked = request("").model_copy(
            update={
                "messages": messages,
                "tools": tools,
                "history": history,
                "history_messages": spoken if last is not None else (),
            }
        )
        ids = [i for i in chat.encode(data.draw(WORDS)) if i != END]
        turn = sample(chat, asked, (*ids, *((END,) if data.draw(st.booleans()) else ())))
        if last is not None and template is not REWRITING:
            own = (*last.prompt_ids, *last.completion_ids)
            assert turn.prompt_ids[: len(own)] == own
        turns.append(turn)
        talks.append(((*messages, turn.message), turn))
    rows = sequences_of(tuple(turns))
    trained = sorted(
        (token, logprob)
        for row in rows
        for token, is_trained, logprob in zip(row.tokens, row.loss_mask, row.logprobs, strict=True)
        if is_trained
    )
    sampled = sorted(
        pair for turn in turns for pair in zip(turn.completion_ids, turn.logprobs, strict=True)
    )
    assert trained == sampled


CHATS: dict[str | None, Chat] = {}
