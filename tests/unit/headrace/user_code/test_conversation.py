"""The conversation that a workflow returns."""

from typing import Any

import pytest

from headrace.user_code.conversation import MOST_CHARACTERS, MOST_MESSAGES, conversation

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_messages_keep_their_tool_calls() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    heard = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add", "extra": 1}
    assert conversation([said, heard]) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "name": "add", "arguments": '{"a": 1}'}],
            "reasoning": "hm",
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ]
    assert conversation(None) is None


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("text", "a list of messages"),
        ([{"role": "user"}], "without role or content"),
        (["text"], "without role or content"),
        ([{"role": "assistant", "tool_calls": "x"}], "not a list"),
        ([{"role": "assistant", "tool_calls": [CALL] * 129}], "at most 128"),
        ([{"role": "assistant", "tool_calls": [{}]}], "function.name"),
        ([{"role": "user", "content": ""}] * (MOST_MESSAGES + 1), "at most 4096 messages"),
        ([{"role": "user", "content": "x" * (MOST_CHARACTERS + 1)}], "characters in all"),
    ],
)
def test_anything_else_is_refused(returned: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        conversation(returned)


async def test_a_call_without_await_is_named() -> None:
    async def chat() -> dict[str, str]:
        return {}

    reply = chat()
    with pytest.raises(
        TypeError, match=r"Solve.run \(main.py:3\) returned the coroutine .*chat.*`await`"
    ):
        conversation([reply], who="Solve.run (main.py:3)")
    await reply
